"""Rules for inputs: undeclared variation, shared random numbers, per-rank batch statistics, sequence orders."""

from __future__ import annotations

from shardfn.check.case import Argument, Case
from shardfn.check.findings import axes_text, given_at, line
from shardfn.check.ops import DISTRIBUTIONS
from shardfn.check.reductions import local_row_axes
from shardfn.check.trace import Gradient, Mask, Node, Ordered, reached, union
from shardfn.check.values import Evidence, Values
from shardfn.check.varying import bits_of


def replica(case: Case, argument: Argument) -> None:
    """Reports an argument that differs along axes where it is declared to be the same."""
    if argument.allowed is None:
        return
    bad = case.compared.nodes.get(argument.node, 0) & ~argument.allowed
    if not bad:
        return
    case.mismatched[argument.node] = bad
    names = case.trace.names(bad)
    case.add(
        argument.node, "replica", bad, argument.path, None,
        "start all ranks from one seed, or from rank 0's value",
        f"{argument.path} is declared to be the same on all ranks along {axes_text(names)}"
        f"{f' ({argument.spec})' if argument.spec else ''}, but its bits differ there. Start all ranks from one "
        f"seed (shardfn.init_sharded does), or declare how it is cut",
    )  # fmt: skip


def same_rows(case: Case) -> None:
    """Reports batches that are declared as sharded, but are the same on every rank."""
    gradients = (event for event in case.trace.events if isinstance(event, Gradient))
    trained = {variable_id for event in gradients for variable_id, _ in event.pairs}
    rows = [a for a in case.compared.arguments if a.plain and not a.constant and a.node not in trained]
    for k, name in enumerate(case.trace.axes):
        bit = 1 << k
        sharded = [a for a in rows if a.allowed and a.allowed & bit]
        if sharded and not any(case.compared.nodes.get(a.node, 0) & bit for a in sharded):
            paths = ", ".join(a.path for a in sharded[:3]) + (f" and {len(sharded) - 3} more" * (len(sharded) > 3))
            case.add(
                sharded[0].node, "same", bit, sharded[0].path, None, f"pass each rank its own rows along {name!r}",
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
    """Returns evidence, for each op that combines random numbers with data, of the draw that it uses.

    Ranks compare it, since each rank may use a different one of several draws.
    """
    keys, draw_keys, meetings = {evidence.node: evidence.key for evidence in values.evidence}, dict[int, int](), []
    for node_id, node in enumerate(values.trace.nodes):
        draws = [draw_keys[p] for p in node.parents if p in draw_keys]
        if node.root == "random":
            draw_keys[node_id] = keys.get(node_id, 0)
        elif draws:
            draw_keys[node_id] = hash(tuple(draws))
            if node.op.removesuffix("_") in _MEETS and not node.backward and len(draws) < len(node.parents):
                meetings.append(Evidence(values.key(node.site, -8), node_id, draw_keys[node_id]))
    return meetings


def noise_of_rows(case: Case) -> None:
    """Reports per-row random numbers that are the same on all ranks, but are combined with rows that vary."""
    random_ids: set[int] = set()
    reported: set[int] = set()
    for node_id, node in enumerate(case.trace.nodes):
        if (node.root == "random" and node.op not in DISTRIBUTIONS) or _only_drawn(case, node, random_ids):
            random_ids.add(node_id)
        elif node.op.removesuffix("_") in _MEETS and not node.backward and random_ids.intersection(node.parents):
            _told_where_met(case, node_id, random_ids, reported)


def _only_drawn(case: Case, node: Node, random_ids: set[int]) -> bool:
    """Whether a value is computed from random numbers and from nothing else that varies."""
    other_parents = [p for p in node.parents if p not in random_ids]
    if node.op in _SEVERAL:
        return False
    varies = any(case.types.along[p] for p in other_parents)
    return not node.root and len(other_parents) < len(node.parents) and not varies


def _told_where_met(case: Case, node_id: int, random_ids: set[int], reported: set[int]) -> None:
    node = case.trace.nodes[node_id]
    for noise in random_ids.intersection(node.parents):
        row_parents = [p for p in node.parents if p not in random_ids and _for_each_row(case, noise, p, node_id)]
        same = union(local_row_axes(case, p) for p in row_parents) & ~case.types.along[noise]
        same &= ~case.compared.watched.get(node_id, 0)
        if not same or same in reported:  # one report is enough for all draws along these axes
            continue
        reported.add(same)
        draw, names = case.trace.nodes[min(_origins(case, noise, random_ids))], case.named(same)
        fix = f"generator=shardfn.fold_in(seed, {names})"
        default = f"torch.manual_seed(shardfn.fold_in(seed, {names}).initial_seed())"
        case.add(
            node_id, "same", same, "", draw.site, fix,
            f"{draw.op.removesuffix('_')}{line(draw.site)} draws the same random numbers on all ranks along {names}, "
            f"for rows that vary there{case.because(row_parents[0], same)}: those of one rank have the noise of those "
            f"of the others. Pass {fix}, or where an op takes none, call {default} before",
        )  # fmt: skip


def _origins(case: Case, noise: int, random_ids: set[int]) -> list[int]:
    """Returns the nodes that drew the random numbers."""
    nodes = case.trace.nodes

    def followed_parents(child: int) -> list[int]:
        return [p for p in nodes[child].parents if p in random_ids and nodes[child].root != "random"]

    return [node_id for node_id in reached([noise], followed_parents) if nodes[node_id].root == "random"]


def _for_each_row(case: Case, noise: int, other: int, node_id: int) -> bool:
    """Whether the random numbers have at least one entry for each of several rows."""
    noise_like, row_like, result_like = (case.trace.nodes[i].like for i in (noise, other, node_id))
    if noise_like is None or row_like is None or result_like is None:
        return False
    if case.trace.nodes[node_id].op.startswith("_scaled_dot_product"):
        return True
    if case.trace.nodes[node_id].op == "cat" and result_like[0][:1] != row_like[0][:1]:
        return False  # rows of noise after others
    return len(noise_like[0]) == len(row_like[0]) > 0 and noise_like[0][0] == row_like[0][0] > 1


def repeated_draws(case: Case) -> None:
    """Reports draws from varying distributions with generators that are the same on all ranks."""
    watched = case.compared.watched
    for node_id in watched:
        draw = case.trace.nodes[node_id]
        same = case.types.along[node_id] & union(watched.get(p, 0) for p in draw.parents) & ~watched[node_id]
        if draw.op in DISTRIBUTIONS and same:
            names = case.named(same)
            fix = f"generator=shardfn.fold_in(seed, {names})"
            case.add(
                node_id, "same", same, "", draw.site, fix,
                f"{draw.op}{line(draw.site)} draws by the same random numbers on all ranks along {names}, from "
                f"distributions that vary there{case.because(node_id, same)}: the rows of one rank have the noise of "
                f"those of the others. Pass {fix}",
            )  # fmt: skip


def batch_statistics(case: Case) -> None:
    """Reports a batch norm whose mean and variance are those of the local rows alone."""
    reported = set()
    for node_id, node in enumerate(case.trace.nodes):
        axes = _by_rows(case, node.parents[0]) if node.root == "statistics" and node.parents else 0
        if not axes or node.site in reported:
            continue
        reported.add(node.site)
        names = case.named(axes)
        case.add(
            node_id, "batch_norm", axes, "", node.site,
            f"shardfn.psum of the sums along {names}",
            f"batch statistics{line(node.site)} are those of this rank's rows alone, which vary along {names}"
            f"{case.because(node.parents[0], axes)}: the result is not that of the whole batch. Sum up counts, "
            f"sums and squares by shardfn.psum along {names}, or use a norm without batch statistics",
        )  # fmt: skip


def _by_rows(case: Case, node_id: int) -> Mask:
    """Returns the axes along which a value varies by more than parameters and statistics."""
    axes = 0
    for bit in bits_of(case.types.along[node_id]):
        roots = case.roots(node_id, bit)
        axes |= bit if any(case.trace.nodes[r].root not in ("parameter", "statistics") for r in roots) else 0
    return axes


_HOW = {True: "in balanced pieces", False: "in order"}


def orders(case: Case) -> None:
    """Reports positions of a sequence whose order differs from the one that causal attention assumes."""
    events = [event for event in case.trace.events if isinstance(event, Ordered) and event.axes]
    for axes in dict.fromkeys(event.axes for event in events):
        positions = {e.balanced: e for e in events if e.axes == axes and e.name == "positions"}
        masks = [e for e in events if e.axes == axes and e.name != "positions" and e.balanced not in positions]
        if len(positions) != 1 or not masks:
            continue
        (position_event,), mask, names = positions.values(), masks[0], case.named(axes)
        fix = f"shardfn.parallel.positions({given_at(position_event.site)}, {names}, balanced={mask.balanced})"
        other = f", or {mask.name}(..., balanced={position_event.balanced})" * (mask.name == "ring_attention")
        case.add(
            mask.at, "order", axes, "", position_event.site, fix,
            f"positions{line(position_event.site)} are those of a sequence cut along {names} "
            f"{_HOW[position_event.balanced]}, and {mask.name}{line(mask.site)} masks keys as if it were cut "
            f"{_HOW[mask.balanced]}: queries see places that are later. Write: {fix}{other}",
        )  # fmt: skip
