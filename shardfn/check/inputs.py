"""Rules for inputs: arguments unlike their declaration, shared random numbers, partial statistics, orders of places."""

from __future__ import annotations

from shardfn.check.case import Argument, Case
from shardfn.check.findings import given_at, line, named
from shardfn.check.ops import DISTRIBUTIONS
from shardfn.check.reductions import rows
from shardfn.check.trace import Gradient, Mask, Node, Ordered, reached, union
from shardfn.check.values import Evidence, Values
from shardfn.check.varying import bits_of


def replica(case: Case, argument: Argument) -> None:
    """An argument that differs along axes where it is declared to be the same."""
    if argument.allowed is None:
        return
    bad = case.compared.nodes.get(argument.node, 0) & ~argument.allowed
    if not bad:
        return
    case.wrong[argument.node] = bad
    names = case.trace.names(bad)
    case.add(
        argument.node, "replica", bad, argument.path, None,
        "start all ranks from one seed, or from rank 0's value",
        f"{argument.path} is declared to be the same on all ranks along {named(names)}"
        f"{f' ({argument.spec})' if argument.spec else ''}, but its bits differ there. Start all ranks from one "
        f"seed (shardfn.init_sharded does), or declare how it is cut",
    )  # fmt: skip


def same_rows(case: Case) -> None:
    """Rows that are declared to be cut, but are the same on every rank."""
    trained = {of for event in case.trace.events if isinstance(event, Gradient) for of, _ in event.pairs}
    rows = [a for a in case.compared.arguments if a.plain and not a.constant and a.node not in trained]
    for k, name in enumerate(case.trace.axes):
        bit = 1 << k
        cut = [a for a in rows if a.allowed and a.allowed & bit]
        if cut and not any(case.compared.nodes.get(a.node, 0) & bit for a in cut):
            paths = ", ".join(a.path for a in cut[:3]) + (f" and {len(cut) - 3} more" * (len(cut) > 3))
            case.add(
                cut[0].node, "same", bit, cut[0].path, None, f"pass each rank its own rows along {name!r}",
                f"{paths}: declared to be cut along {name!r}, but the bits are the same on all ranks along it: "
                f"each rank reads the same rows. Pass each its own, by shardfn.axis_index({name!r}) or "
                f"shardfn.run.batches, or let shard_map cut whole values, by inputs='global'",
            )  # fmt: skip


_MEETS = ("mul", "add", "sub", "div", "where", "masked_fill", "addcmul", "addcdiv", "lerp", "native_dropout", "cat",
          "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
          "binary_cross_entropy_with_logits",
          "_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention",
          "_scaled_dot_product_efficient_attention")  # fmt: skip


_SEVERAL = ("split", "split_with_sizes", "unsafe_split", "unsafe_chunk", "unbind")  # ranks may use different results


def draws_met(values: Values) -> list[Evidence]:
    """Returns evidence on which draw meets other values at which node: each rank may use another of several draws."""
    keys, drawn, met = {evidence.node: evidence.key for evidence in values.evidence}, dict[int, int](), []
    for at, node in enumerate(values.trace.nodes):
        draws = [drawn[p] for p in node.parents if p in drawn]
        if node.root == "random":
            drawn[at] = keys.get(at, 0)
        elif draws:
            drawn[at] = hash(tuple(draws))
            if node.op.removesuffix("_") in _MEETS and not node.backward and len(draws) < len(node.parents):
                met.append(Evidence(values.key(node.site, -8), at, drawn[at]))
    return met


def noise_of_rows(case: Case) -> None:
    """Random numbers for each row that generators draw alike on all ranks, where they meet rows that vary."""
    drawn: set[int] = set()
    reported: set[int] = set()
    for at, node in enumerate(case.trace.nodes):
        if (node.root == "random" and node.op not in DISTRIBUTIONS) or _only_drawn(case, node, drawn):
            drawn.add(at)
        elif node.op.removesuffix("_") in _MEETS and not node.backward and drawn.intersection(node.parents):
            _told_where_met(case, at, drawn, reported)


def _only_drawn(case: Case, node: Node, drawn: set[int]) -> bool:
    """Whether a value is made of random numbers and otherwise of nothing that varies."""
    others = [p for p in node.parents if p not in drawn]
    if node.op in _SEVERAL:
        return False
    return not node.root and len(others) < len(node.parents) and not any(case.types.along[p] for p in others)


def _told_where_met(case: Case, at: int, drawn: set[int], reported: set[int]) -> None:
    node = case.trace.nodes[at]
    for noise in drawn.intersection(node.parents):
        others = [p for p in node.parents if p not in drawn and _for_each_row(case, noise, p, at)]
        same = union(rows(case, p) for p in others) & ~case.types.along[noise]
        same &= ~case.compared.watched.get(at, 0)
        if not same or same in reported:  # one report is enough for all draws along these axes
            continue
        reported.add(same)
        draw, names = case.trace.nodes[min(_origins(case, noise, drawn))], case.named(same)
        fix = f"generator=shardfn.fold_in(seed, {names})"
        default = f"torch.manual_seed(shardfn.fold_in(seed, {names}).initial_seed())"
        case.add(
            at, "same", same, "", draw.site, fix,
            f"{draw.op.removesuffix('_')}{line(draw.site)} draws the same random numbers on all ranks along {names}, "
            f"for rows that vary there{case.because(others[0], same)}: those of one rank have the noise of those of "
            f"the others. Pass {fix}, or where an op takes none, call {default} before",
        )  # fmt: skip


def _origins(case: Case, noise: int, drawn: set[int]) -> list[int]:
    """Returns the nodes that drew the random numbers."""
    nodes = case.trace.nodes

    def onward(at: int) -> list[int]:
        return [p for p in nodes[at].parents if p in drawn and nodes[at].root != "random"]

    return [at for at in reached([noise], onward) if nodes[at].root == "random"]


def _for_each_row(case: Case, noise: int, other: int, at: int) -> bool:
    """Whether the random numbers hold one entry or more for each of several rows."""
    noise_like, row_like, result_like = (case.trace.nodes[k].like for k in (noise, other, at))
    if noise_like is None or row_like is None or result_like is None:
        return False
    if case.trace.nodes[at].op.startswith("_scaled_dot_product"):
        return True
    if case.trace.nodes[at].op == "cat" and result_like[0][:1] != row_like[0][:1]:
        return False  # rows of noise after others
    return len(noise_like[0]) == len(row_like[0]) > 0 and noise_like[0][0] == row_like[0][0] > 1


def repeated_draws(case: Case) -> None:
    """Draws from distributions that vary by generators that do not."""
    watched = case.compared.watched
    for at in watched:
        draw = case.trace.nodes[at]
        same = case.types.along[at] & union(watched.get(p, 0) for p in draw.parents) & ~watched[at]
        if draw.op in DISTRIBUTIONS and same:
            names = case.named(same)
            fix = f"generator=shardfn.fold_in(seed, {names})"
            case.add(
                at, "same", same, "", draw.site, fix,
                f"{draw.op}{line(draw.site)} draws by the same random numbers on all ranks along {names}, from "
                f"distributions that vary there{case.because(at, same)}: the rows of one rank have the noise of those "
                f"of the others. Pass {fix}",
            )  # fmt: skip


def batch_statistics(case: Case) -> None:
    """A batch norm that takes its mean and variance from this rank's rows alone."""
    reported = set()
    for at, node in enumerate(case.trace.nodes):
        along = _by_rows(case, node.parents[0]) if node.root == "statistics" and node.parents else 0
        if not along or node.site in reported:
            continue
        reported.add(node.site)
        names = case.named(along)
        case.add(
            at, "batch_norm", along, "", node.site,
            f"shardfn.psum of the sums along {names}",
            f"batch statistics{line(node.site)} are those of this rank's rows alone, which vary along {names}"
            f"{case.because(node.parents[0], along)}: the result is not that of the whole batch. Sum up counts, "
            f"sums and squares by shardfn.psum along {names}, or use a norm without batch statistics",
        )  # fmt: skip


def _by_rows(case: Case, at: int) -> Mask:
    """Returns the axes along which a value varies by more than parameters and statistics."""
    axes = 0
    for bit in bits_of(case.types.along[at]):
        roots = case.roots(at, bit)
        axes |= bit if any(case.trace.nodes[r].root not in ("parameter", "statistics") for r in roots) else 0
    return axes


_HOW = {True: "in balanced pieces", False: "in order"}


def orders(case: Case) -> None:
    """A sequence that is cut in one order, where causal attention takes it to be cut in another."""
    events = [event for event in case.trace.events if isinstance(event, Ordered) and event.axes]
    for axes in dict.fromkeys(event.axes for event in events):
        asked = {e.balanced: e for e in events if e.axes == axes and e.name == "positions"}
        masks = [e for e in events if e.axes == axes and e.name != "positions" and e.balanced not in asked]
        if len(asked) != 1 or not masks:
            continue
        (cut,), mask, names = asked.values(), masks[0], case.named(axes)
        fix = f"shardfn.parallel.positions({given_at(cut.site)}, {names}, balanced={mask.balanced})"
        other = f", or {mask.name}(..., balanced={cut.balanced})" * (mask.name == "ring_attention")
        case.add(
            mask.at, "order", axes, "", cut.site, fix,
            f"positions{line(cut.site)} are those of a sequence cut along {names} {_HOW[cut.balanced]}, and "
            f"{mask.name}{line(mask.site)} masks keys as if it were cut {_HOW[mask.balanced]}: queries see places that "
            f"are later. Write: {fix}{other}",
        )  # fmt: skip
