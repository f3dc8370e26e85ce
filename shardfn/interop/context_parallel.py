"""Context parallelism for unmodified models of `transformers`: their attention runs over rows sharded over an axis.

The model makes its masks from functions of positions. Each is taken apart into `causal`, `window` and documents, and
compared with them; a mask of any other kind raises an error. After the first call one poisoned position shows whether
anything but attention mixes positions, and a padded row shows whether the arguments of `cut` are those of the model.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from shardfn.collectives.agree import agree
from shardfn.collectives.functional import axis_size
from shardfn.compat import devices, dispatch
from shardfn.interop.conversions import of_transformers, stretches_rope
from shardfn.interop.placeholder import Slot, placed
from shardfn.interop.pytrees import Forms
from shardfn.mesh.grid import AxisName
from shardfn.mesh.planned import planned
from shardfn.mesh.scope import current_mesh
from shardfn.parallel.attention import Mask, positions, ring_attention, ulysses_attention
from shardfn.quoting import listed
from shardfn.shards.replicated import checksum

Method = Literal["ring", "ulysses"]
IGNORED = -100  # the label of tokens without a loss, as in torch and transformers
_BY_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids", "attention_mask", "documents", "labels")
_PROBED, _POISONED = 13, 4  # tokens of a probe, and which of them is not a number
_PADDED = 3  # tokens of padding in a whole row
_probing: contextvars.ContextVar[Literal["", "poisoned", "whole"]] = contextvars.ContextVar("_probing", default="")


class ContextParallel:
    """The attention of a model of `transformers` over rows sharded over an axis.

    Raises:
        TypeError: the module is no such model, computes attention by itself, or takes no positions.

    Attributes:
        axis: the mesh axis; where the mesh has none of that name, rows are full.
        method: "ring", or "ulysses", over rows in order.
        window: of all layers, if they have one; a ring is over rows in order if it reaches the next rank only.
        name: of the model's class.
        probed: whether a call has shown that only attention mixes positions.
        shifts: whether labels are those of the next token; None if the model's loss does not tell.
        parameters: of the model's forward.
        uncached: the argument without which the model makes a cache.
        numbering: the positions that the model gives to tokens.
        stretches_from: the length from which frequencies depend on the longest position; None for no length.
        compared: the layouts of batches of which a call has shown that ranks have the same whole rows.
    """

    def __init__(self, module: nn.Module, axis: str, method: Method) -> None:
        name = type(module).__name__
        if method not in ("ring", "ulysses"):
            raise ValueError(f'functional: context_attention must be "ring" or "ulysses", got {method!r}')
        if not isinstance(axis, str):
            raise TypeError(f"functional: context must be the name of a mesh axis, got {axis!r}")
        refused = f"functional: context must be None for {name}, got {axis!r}"
        if not of_transformers(module):
            raise TypeError(f"{refused}: it is no model of transformers. Call parallel.ring_attention in its forward")
        self.parameters = frozenset(inspect.signature(module.forward).parameters)
        if "position_ids" not in self.parameters:
            raise TypeError(
                f"{refused}: its forward takes no position_ids, so that each rank would count positions from 0. Make "
                f"the model without context="
            )
        for m in _models(module):
            if not m._can_set_attn_implementation():
                raise TypeError(
                    f"{refused}: {type(m).__name__} computes attention by itself, not by transformers' "
                    f"AttentionInterface. Make the model without context="
                )
        if scaling := next((m for m in module.modules() if hasattr(m, "token_dropout")), None):
            raise TypeError(
                f"{refused}: {type(scaling).__name__} scales embeddings by the number of mask tokens, which each rank "
                f"would count in its piece. Make the model without context="
            )
        self.axis, self.method, self.name, self.probed = axis, method, name, False
        self.window = _window_of(module.config)
        self.shifts = _shifts_labels(module)
        accepts = "use_cache" in self.parameters or any(
            p.kind is p.VAR_KEYWORD for p in inspect.signature(module.forward).parameters.values()
        )
        config: Any = module.config
        caches = "use_cache" in self.parameters or getattr(config.get_text_config(), "use_cache", False)
        self.uncached = {"use_cache": False} if accepts and caches else {}
        self.numbering = _numbering_of(module)
        self.stretches_from = min(map(_original_length, filter(stretches_rope, module.modules())), default=None)
        self.compared: set[Any] = set()

    def install(self, module: nn.Module) -> None:
        """Sets the model's attention, in a copy of its configuration, which other models may share."""
        from transformers import AttentionInterface, PreTrainedConfig
        from transformers.masking_utils import AttentionMaskInterface

        implementation = f"shardfn_{self.method}_{self.axis}_{self.window}"
        # Traced, attention would gather all keys. So compiled layers stop before it, and go on after it.
        attend = torch.compiler.disable(_attend, reason="attention with context= runs as a ring between graphs")
        AttentionInterface.register(implementation, functools.partial(attend, self.method, self.axis, self.window))
        AttentionMaskInterface.register(implementation, functools.partial(_mask_description, self.axis))
        copies: dict[int, Any] = {}
        for m in module.modules():
            for key, value in vars(m).items():
                if isinstance(value, PreTrainedConfig):
                    vars(m)[key] = copy.deepcopy(value, copies)
        for m in _models(module):
            m.config._attn_implementation = implementation

    def cut(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Implements `Functional.cut`."""
        tensors = {name: x for name, x in batch.items() if x is not None}
        if unknown := set(tensors) - set(_BY_TOKEN):
            raise TypeError(
                f"cut: batch has {listed(map(repr, sorted(unknown)))}, which are not sharded by token. Leave them out, "
                f"and pass them to the model; cut takes {', '.join(_BY_TOKEN)}"
            )
        rows = next((tensors[name] for name in _BY_TOKEN[:2] if name in tensors), None)
        if rows is None:
            raise ValueError("cut: batch must have input_ids or inputs_embeds, got neither")
        if "position_ids" in tensors and tensors["position_ids"].shape == (1, rows.shape[1]):
            tensors["position_ids"] = tensors["position_ids"].expand(rows.shape[:2])
        for name, x in tensors.items():
            by_token = x.shape if name in ("attention_mask", "documents", "position_ids") else x.shape[:2]
            if by_token != rows.shape[:2]:
                raise ValueError(
                    f"cut: {name} must be {list(rows.shape[:2])}, of whole rows, got {list(x.shape)}. Pass it as it is "
                    f"before rows are sharded"
                )
        if self.shifts is None and "labels" in tensors:
            raise TypeError(
                f"cut: labels must be left out for {self.name}, whose loss does not tell whether they are those of the "
                f"next token. Before functional, set module.loss_function to ForCausalLMLoss or ForMaskedLMLoss of "
                f"transformers.loss.loss_utils"
            )
        axis = self.bound()
        size = axis_size(axis)
        if size > 1:
            self._compare_rows(tensors)
        length = rows.shape[1]
        described = not tensors.keys().isdisjoint(("attention_mask", "documents", "position_ids"))
        padded = "attention_mask" in tensors
        real = _real_tokens(tensors.pop("attention_mask", torch.ones(rows.shape[:2], device="cpu")))
        documents, places = tensors.pop("documents", None), tensors.get("position_ids")
        labels = tensors.pop("labels", rows if self.shifts and "input_ids" in tensors else None)
        documents = _documents_of(places, real, padded) if documents is None else _document_runs(documents, real)
        if self.shifts and labels is not None:
            labels = _next_tokens(labels, documents, real)
        if places is None:
            uncounted = self.numbering.uncounted
            ids = tensors.get("input_ids") if isinstance(uncounted, int) else None
            counted = real if uncounted == "masked" else torch.ones_like(real) if ids is None else ids != uncounted
            places = _positions_in(devices.uploaded(documents, counted.device), counted, self.numbering.start)
            tensors["position_ids"] = devices.uploaded(places, rows.device)
        if size > 1 and self.stretches_from is not None:
            self._refuse_stretched(places, length)
        pieces = 2 * size if self.method == "ring" and size > 1 else size
        full = -(-length // pieces) * pieces
        balanced = self.method == "ring" and _balances(self.window, full // size)
        local = positions(full, axis, balanced=balanced, device=rows.device)
        inputs: dict[str, Any] = {name: _padded(x, full, 0)[:, local] for name, x in tensors.items()}
        inputs.update(self.uncached)  # which transformers would make by default
        # Of five dimensions: models flatten masks of fewer than four, and transformers takes those of four as they are.
        ids = _padded(documents.where(real, 0), full, 0)[:, None, None, None]
        inputs["attention_mask"] = ids if described or full > length else ids[:, :0]  # known without its numbers
        return inputs, None if labels is None else _padded(labels, full, IGNORED)[:, local]

    def _compare_rows(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ValueError on all ranks along the axis if their rows differ, at the first batch of a layout."""
        mesh, layout = current_mesh(), tuple(sorted((name, str(x.dtype)) for name, x in tensors.items()))
        if mesh is None or planned() or not all(map(dispatch.readable, tensors.values())):
            return
        if (mesh, layout) not in self.compared:
            lines = [f"{name}: {x.dtype} {tuple(x.shape)} with checksum {checksum(x)}" for name, x in tensors.items()]
            advice = f"cut takes whole rows, the same along {self.axis!r}. Shard the batch over data axes only"
            agree(lines, mesh, "cut", subject=("the rows", advice), axes=(self.axis,))
            self.compared.add((mesh, layout))

    def _refuse_stretched(self, places: Tensor, length: int) -> None:
        longest = int(places.max()) + 1 if dispatch.readable(places) and not planned() else length
        if longest > (self.stretches_from or longest):
            raise ValueError(
                f"cut: rows must have at most {self.stretches_from} positions, got {longest}: beyond, {self.name} "
                f"takes frequencies from the longest position, of which each rank has its own. Make the model without "
                f"context="
            )

    def bound(self) -> AxisName:
        """The axis, or `()` where no mesh is in scope.

        Raises:
            ValueError: the mesh in scope has no axis of this name.
        """
        mesh = current_mesh()
        if mesh is not None and self.axis not in (names := mesh.mesh_dim_names or ()):
            raise ValueError(
                f"{self.name}: context must be an axis of the mesh, got {self.axis!r}, and the mesh has "
                f"{', '.join(names)}. For whole rows on every rank, make it with an axis of this name and size 1"
            )
        return _bound(self.axis)

    def refuse(self, module: Any, kwargs: Mapping[str, Any], method: str) -> None:
        """Raises TypeError for a call that a model does not support while its rows are sharded."""
        routed = kwargs.get("output_router_logits")
        routed = getattr(module.config.get_text_config(), "output_router_logits", False) if routed is None else routed
        if routed and getattr(kwargs.get("attention_mask"), "ndim", 0) == 5:
            raise TypeError(
                f"{self.name}: with the arguments of cut, output_router_logits=True is not supported: the loss of "
                f"routers is a mean over whole rows. Pass output_router_logits=False"
            )
        if axis_size(self.bound()) == 1:
            return
        where = f"{self.name}: with rows sharded over {self.axis!r}"
        if method != "__call__":
            raise TypeError(f"{where}, method={method!r} is not supported. Make the model without context=")
        if kwargs.get("labels") is not None:
            raise TypeError(
                f"{where}, labels= is not supported: each rank would shift its own piece. Write inputs, labels = "
                f"model.cut(batch), and compute the loss from model(params, **inputs).logits"
            )
        if kwargs.get("use_cache") or kwargs.get("past_key_values") is not None:
            raise TypeError(f"{where}, caches are not supported. Leave out use_cache and past_key_values")
        if not isinstance(kwargs.get("logits_to_keep", 0), int) or kwargs.get("logits_to_keep", 0):
            raise TypeError(f"{where}, logits_to_keep is not supported. Leave it out")
        attention_mask, places = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if getattr(attention_mask, "ndim", 0) != 5 or getattr(places, "ndim", 0) != 2:
            raise TypeError(
                f"{where}, attention_mask and position_ids must be those of whole rows. Write inputs, labels = "
                f"model.cut(batch), then model(params, **inputs)"
            )

    def probe(
        self, module: Any, device: torch.device, dtype: torch.dtype | None, run: Callable[[dict[str, Any]], Any]
    ) -> None:
        """Raises ValueError if the model mixes positions other than by attention, or `cut` makes other arguments.

        Attention gives each query its own value. So if the embedding of one position is not a number, all others are.
        """
        modes = [Slot(vars(m), "training", "training") for m in module.modules()]
        with torch.no_grad(), placed(modes, [False] * len(modes)):
            self._refuse_mixing(module, device, dtype, run)
            if "input_ids" in self.parameters:
                self._refuse_other_arguments(module.config.get_text_config(), device, run)
        self.probed = True

    def _refuse_mixing(
        self, module: Any, device: torch.device, dtype: torch.dtype | None, run: Callable[[dict[str, Any]], Any]
    ) -> None:
        table = module.get_input_embeddings().weight
        embedded = torch.arange(_PROBED * table.shape[-1], device=device).cos().view(1, _PROBED, -1)
        embedded = embedded.to(dtype or table.dtype)
        embedded[:, _POISONED] = torch.nan
        kwargs = {"inputs_embeds": embedded, "position_ids": torch.arange(_PROBED, device=device)[None]}
        token = _probing.set("poisoned")
        try:
            out = run({**kwargs, **self.uncached})
        finally:
            _probing.reset(token)
        finite = [i for i in range(_PROBED) if i != _POISONED]
        for x in self._values_by_token(out):
            if not x[:, finite].isfinite().all():
                raise ValueError(
                    f"{self.name}: mixes positions by other operations than attention, such as convolutions or "
                    f"recurrences, which would not see the pieces of other ranks. Make the model without context="
                )

    def _refuse_other_arguments(self, config: Any, device: torch.device, run: Callable[[dict[str, Any]], Any]) -> None:
        """Compares the model on a whole row with padding with the model on the arguments of `cut` for that row."""
        keys = [key for key in vars(config) if key.endswith(("_token_id", "_token_index"))]
        special = {x for key in keys for x in _listed_ids(config, key)}
        words = [x for x in range(min(config.vocab_size, _PROBED + len(special))) if x not in special] or [0]
        padding = next(iter(_listed_ids(config, "pad_token_id")), words[0])
        row = [padding] * _PADDED + [words[i % len(words)] for i in range(_PROBED - _PADDED)]
        real = torch.arange(_PROBED, device=device) >= _PADDED
        batch = {"input_ids": torch.tensor([row], device=device), "attention_mask": real.long()[None]}
        token = _probing.set("whole")
        try:
            want, got = run({**batch, **self.uncached}), run(self.cut(batch)[0])
        finally:
            _probing.reset(token)
        for a, b in zip(self._values_by_token(want), self._values_by_token(got), strict=True):
            a, b = a[:, _PADDED:], b[:, _PADDED:]
            limit = (0.05 if a.element_size() < 4 else 1e-3) * float(a.nan_to_num().abs().max())
            if not torch.allclose(a, b, rtol=0, atol=limit, equal_nan=True):
                raise ValueError(
                    f"{self.name}: gives other outputs for a row with padding than with the arguments of cut, as its "
                    f"positions or masks follow another rule. Make the model without context="
                )

    def _values_by_token(self, out: Any) -> list[Tensor]:
        """The floating-point values of an output, `[1, t, ...]`."""
        values = []
        for x in Forms().flatten(out)[0]:
            if not isinstance(x, Tensor) or not x.is_floating_point():
                continue
            dim = next((d for d in (1, 0) if x.ndim > d and x.shape[d] == _PROBED), None)
            if dim is None:
                raise ValueError(
                    f"{self.name}: returns a value of shape {tuple(x.shape)} for {_PROBED} tokens, which is not by "
                    f"token, such as a pooled one: no rank has whole rows. Take the model without its pooling head"
                )
            values.append(x if dim else x[None])
        return values


def _models(module: nn.Module) -> list[Any]:
    """The models of `transformers` inside a module, itself included."""
    return [m for m in module.modules() if of_transformers(m)]


def _bound(axis: str) -> AxisName:
    mesh = None if _probing.get() == "whole" else current_mesh()
    return axis if mesh is not None and axis in (mesh.mesh_dim_names or ()) else ()


def _shifts_labels(module: Any) -> bool | None:
    """Whether the loss of a model compares outputs with the labels of the next token; None if that is not known."""
    from transformers.loss import loss_utils

    loss, kind = vars(module).get("_loss_function"), getattr(module, "loss_type", None) or ""
    named = kind in ("ForCausalLM", "ForMaskedLM", "ForTokenClassification")
    if loss is None and (named or "loss_function" in inspect.unwrap(type(module).forward).__code__.co_names):
        loss = loss_utils.LOSS_MAPPING.get(kind, loss_utils.ForCausalLMLoss)  # as `PreTrainedModel.loss_function`
    if loss is loss_utils.ForCausalLMLoss:
        return True
    by_token = loss in (loss_utils.ForMaskedLMLoss, loss_utils.ForTokenClassification)
    return False if by_token or "labels" not in inspect.signature(module.forward).parameters else None


class _Numbering(NamedTuple):
    """The positions that a model gives to tokens, if none are passed.

    Attributes:
        start: the position of the first token that counts; tokens that do not count have the position before.
        uncounted: the id of tokens that do not count, or "masked" for those outside the attention mask.
    """

    start: int = 0
    uncounted: int | Literal["masked"] | None = None


def _numbering_of(module: nn.Module) -> _Numbering:
    """The positions of embeddings like those of RoBERTa, which count from the padding's id, of OPT, or of others."""
    make = "create_position_ids_from_input_ids"
    for m in module.modules():
        padding = getattr(m, "padding_idx", None)
        if isinstance(padding, int) and (hasattr(m, make) or hasattr(sys.modules[type(m).__module__], make)):
            return _Numbering(padding + 1, padding)
        tables = [child for child in m.children() if isinstance(child, nn.Embedding)]
        masked = any("attention_mask" in inspect.signature(table.forward).parameters for table in tables)
        if masked and "cumsum" in inspect.unwrap(type(m).forward).__code__.co_names:
            return _Numbering(0, "masked")
    return _Numbering()


def _original_length(m: Any) -> int:
    """The length from which the rotary frequencies of a module depend on the longest position."""
    rope = m.config.rope_parameters
    lengths = [x.get("original_max_position_embeddings") for x in (rope, *rope.values()) if isinstance(x, dict)]
    return min(x for x in (*lengths, m.original_max_seq_len) if x is not None)


def _listed_ids(config: Any, key: str) -> list[int]:
    """The ids of tokens at a key of a configuration, which has one, several or none."""
    ids = getattr(config, key, None)
    return [x for x in (ids if isinstance(ids, (list, tuple)) else [ids]) if isinstance(x, int) and x >= 0]


def _window_of(config: Any) -> int | None:
    """The window of all layers of a model; None if any layer has none."""
    config = config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    window: int | None = getattr(config, "sliding_window", None)
    return window if kinds == {"sliding_attention"} else None


def _balances(window: int | None, length: int) -> bool:
    """Whether rows are balanced in pieces of `length`: in order, a window that reaches one rank back sends less."""
    return window is None or window - 1 > length


def _padded(x: Tensor, length: int, value: float) -> Tensor:
    """Whole rows `[b, t, ...]`, with `value` at the end."""
    missing = length - x.shape[1]
    return x if not missing else torch.cat((x, x.new_full((len(x), missing, *x.shape[2:]), value)), 1)


def _real_tokens(attention_mask: Tensor) -> Tensor:
    """The tokens that are no padding, on the CPU."""
    mask = attention_mask.cpu()
    if dispatch.readable(mask) and not planned() and bool(mask.numel()) and bool(((mask != 0) & (mask != 1)).any()):
        raise ValueError(
            f"cut: attention_mask must be 0 at padding and 1 elsewhere, got {mask.max().item()}. Pass ids of "
            f"documents as documents="
        )
    return mask != 0


def _document_runs(documents: Tensor, real: Tensor) -> Tensor:
    """Documents numbered from 1 in each row, in place of their ids."""
    if documents.dtype == torch.bool or documents.is_floating_point() or documents.is_complex():
        raise TypeError(f"cut: documents must be ids of an integer dtype, got {documents.dtype}. Pass documents.long()")
    documents = documents.cpu().long()
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    if dispatch.readable(documents) and not planned():
        starts, runs = begins.flatten().nonzero()[:, 0], begins.flatten().cumsum(0) - 1
        used = starts[runs[real.flatten()].unique_consecutive()]
        ids = torch.stack((used // max(documents.shape[1], 1), documents.flatten()[used]), 1)
        if len(ids.unique(dim=0)) < len(ids):
            raise ValueError(
                "cut: documents must have one id for each run of tokens, got an id that returns after another in a "
                "row. Number the documents of a row in order"
            )
    return begins.cumsum(1)


def _documents_of(places: Tensor | None, real: Tensor, padded: bool) -> Tensor:
    """Ids of documents from 1, which begin where positions of whole rows jump, as transformers infers them."""
    if places is None:
        return torch.ones_like(real, dtype=torch.int64)
    places = places.cpu()
    jumps = torch.zeros_like(real, dtype=torch.int64)
    jumps[:, 1:] = (places[:, 1:] - places[:, :-1] != 1) & real[:, 1:] & real[:, :-1]
    if padded and not bool(real.all()) and bool(jumps.any()):
        raise ValueError(
            "cut: position_ids must not jump between tokens of rows with padding, got both: transformers would let "
            "documents see each other. Pass documents=, ids of the documents of tokens, in the batch"
        )
    return 1 + jumps.cumsum(1)


def _positions_in(documents: Tensor, counted: Tensor, start: int) -> Tensor:
    """The position of each token in its document, where the tokens that count have positions from `start`."""
    numbers = counted.cumsum(1)
    begins = torch.ones_like(counted)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    before = (numbers - counted.long()).where(begins, 0).cummax(1).values
    return (numbers - before) * counted + (start - 1)


def _next_tokens(labels: Tensor, documents: Tensor, real: Tensor) -> Tensor:
    """The label of the next token, for each token; none across documents and around padding."""
    shifted = _padded(labels[:, 1:], labels.shape[1], IGNORED).clone()
    same = (documents[:, 1:] == documents[:, :-1]) & real[:, 1:] & real[:, :-1]
    shifted[:, :-1] = shifted[:, :-1].where(devices.uploaded(same, labels.device), IGNORED)
    return shifted


# --- what transformers calls ---

_NOT_SUPPORTED = ("position_bias", "cache", "head_mask", "cu_seq_lens_q", "cu_seq_lens_k", "output_attentions")


def _attend(
    method: Method,
    axis: str,
    window: int | None,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of `AttentionInterface`: `[b, h, t, d], ... -> [b, t, h, e]`."""
    if _probing.get() == "poisoned":
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None
    name = type(module).__name__
    if requested := [key for key in _NOT_SUPPORTED if kwargs.get(key) not in (None, False)]:
        raise TypeError(f"{name}: attention with context= does not support {listed(requested)}. Do not request it")
    if dropout:
        raise ValueError(
            f"{name}: attention dropout must be 0 with context=, got {dropout}. Set attention_dropout=0.0 in the "
            f"configuration"
        )
    if attention_mask is None and getattr(module, "is_causal", True) is False:
        attention_mask = Mask(causal=False)
    if not isinstance(attention_mask, Mask):
        raise TypeError(
            f"{name}: attention_mask must be made by transformers' masking functions with context=, got "
            f"{type(attention_mask).__name__}. Write inputs, labels = model.cut(batch), then model(params, **inputs)"
        )
    if s_aux is None and hasattr(module, "sinks"):
        raise TypeError(f"{name}: has sinks that it does not pass to attention. Make the model without context=")
    options: dict[str, Any] = {"mask": attention_mask, "scale": scaling, "sinks": s_aux, "softcap": softcap}
    bound = _bound(axis)
    if method == "ring":
        out = ring_attention(query, key, value, bound, balanced=_balances(window, query.shape[2]), **options)
    else:
        out = ulysses_attention(query, key, value, bound, **options)
    return out.transpose(1, 2).contiguous(), None


class _ModelMask(Mask):
    """The mask that a model passes to its attention."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"attention_mask: has no {name!r} with context=, where it is a description that attention reads. The model "
            f"computes with its mask by itself: make it without context="
        )


def _mask_description(
    axis: str,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    config: Any = None,
    **_: Any,
) -> _ModelMask:
    """The mask function of `AttentionMaskInterface`, with a `Mask` in place of a tensor.

    Raises:
        ValueError: the mask is not described by `causal`, `window` and documents.
    """
    where = type(config).__name__.removesuffix("Config")
    parts = list(_parts(mask_function, where))
    causal = any(part.kind == "causal" for part in parts)
    window = min((part.value for part in parts if part.kind == "window"), default=None)
    documents = next((part.value for part in parts if part.kind == "documents"), None)
    _refuse_undescribed(parts, causal, window, where)
    if _probing.get() == "poisoned":
        return _ModelMask()
    size = axis_size(_bound(axis))
    if attention_mask is not None and attention_mask.ndim == 5:
        if not attention_mask.shape[1]:
            return _ModelMask(causal, window)
        ids = attention_mask[:, 0, 0, 0]
        padding = ids == 0
        known = dispatch.readable(ids) and not planned()  # otherwise, as in a compiled step, masks depend on no values
        packed = not known or bool((ids > 1).any())
        padded = not known or bool(padding.any())
        return _ModelMask(causal, window, ids if packed else None, padding if padded else None)
    if size > 1 or q_length != kv_length:
        raise ValueError(
            f"{where}: attention_mask must be that of whole rows where {axis!r} shards them. Write inputs, labels = "
            f"model.cut(batch), then model(params, **inputs)"
        )
    return _ModelMask(causal, window, documents, None if attention_mask is None else ~attention_mask)


class _Part(NamedTuple):
    """A condition of a mask function of transformers.

    Attributes:
        kind: "causal", "window", "documents", or "" for none.
        value: of the field of `Mask`.
        function: that transformers evaluates, `(batch, head, query, key) -> whether the query sees the key`.
    """

    kind: str
    value: Any
    function: Callable[..., Any]


def _parts(mask_function: Callable[..., Any], where: str) -> Iterator[_Part]:
    """The conditions of which a mask function of transformers is the conjunction."""
    kind = getattr(mask_function, "__qualname__", repr(mask_function)).partition(".")[0]
    if getattr(mask_function, "__module__", "") != "transformers.masking_utils":
        kind = "a function of the model"
    values = inspect.getclosurevars(mask_function).nonlocals
    if kind == "causal_mask_function":
        yield _Part("causal", True, mask_function)
    elif kind == "sliding_window_overlay":
        yield _Part("window", values["sliding_window"], mask_function)
    elif kind == "sliding_window_bidirectional_overlay":
        yield _Part("window", values["sliding_window"] + 1, mask_function)
    elif kind == "bidirectional_mask_function":
        yield _Part("", None, mask_function)
    elif kind == "packed_sequence_mask_function":
        yield _Part("documents", values["packed_sequence_mask"], mask_function)
    elif kind == "remap_positions_for_packed_sequence":
        yield from _parts(values["mask_function"], where)
    elif kind == "and_masks":
        for part in values["mask_functions"]:
            yield from _parts(part, where)
    else:
        raise ValueError(
            f"{where}: its attention mask has {kind}, which context= does not describe by causal, window and "
            f"documents. Make the model without context="
        )


def _refuse_undescribed(parts: Sequence[_Part], causal: bool, window: int | None, where: str) -> None:
    """Raises ValueError if transformers sees a different key than `Mask`, at the first positions or near the window."""
    edges = () if window is None else (window - 1, window, window + 1, 2 * window, 2 * window + 1)
    places = sorted({*range(8), *edges})
    for query, key in itertools.product(places, places):
        near = window is None or abs(query - key) < window or (causal and key > query)
        visible = all(part.function(0, 0, query, key) for part in parts if part.kind != "documents")
        if visible != (near and not (causal and key > query)):
            raise ValueError(
                f"{where}: its attention mask is not that of causal={causal}, window={window} at query {query}, key "
                f"{key}. Make the model without context="
            )
