"""Context parallelism for unmodified models of `transformers`: their attention runs over rows sharded over an axis.

The model makes its masks from functions of positions. Each is taken apart into `causal`, `window` and documents, and
compared with them; a mask of any other kind raises an error. After the first call one poisoned position shows whether
anything but attention mixes positions.
"""

from __future__ import annotations

import contextvars
import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from shardfn.collectives.functional import axis_size
from shardfn.compat import devices, dispatch
from shardfn.interop.conversions import of_transformers
from shardfn.interop.placeholder import Slot, placed
from shardfn.interop.pytrees import Forms
from shardfn.mesh.grid import AxisName
from shardfn.mesh.planned import planned
from shardfn.mesh.scope import current_mesh
from shardfn.parallel.attention import Mask, positions, ring_attention, ulysses_attention
from shardfn.quoting import listed

Method = Literal["ring", "ulysses"]
IGNORED = -100  # the label of tokens without a loss, as in torch and transformers
_BY_TOKEN = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids", "attention_mask", "documents", "labels")
_PROBED, _POISONED = 13, 4  # tokens of a probe, and which of them is not a number
_probing = contextvars.ContextVar("_probing", default=False)


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
        shifts: whether labels are those of the next token.
        parameters: of the model's forward.
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
        self.axis, self.method, self.name, self.probed = axis, method, name, False
        self.window = _window_of(module.config)
        self.shifts = getattr(module, "loss_type", None) == "ForCausalLM"

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
        for name, x in tensors.items():
            if x.shape[:2] != rows.shape[:2]:
                raise ValueError(
                    f"cut: {name} must be {list(rows.shape[:2])}, of whole rows, got {list(x.shape)}. Pass it as it is "
                    f"before rows are sharded"
                )
        length = rows.shape[1]
        described = not tensors.keys().isdisjoint(("attention_mask", "documents", "position_ids"))
        padded = "attention_mask" in tensors
        real = tensors.pop("attention_mask", torch.ones(rows.shape[:2], device="cpu")).cpu() != 0
        documents = tensors.pop("documents", None)
        labels = tensors.pop("labels", rows if self.shifts and "input_ids" in tensors else None)
        if documents is None:
            documents = _documents_of(tensors.get("position_ids"), real, padded)
        else:
            documents = documents.cpu()
            documents = documents - documents.min() + 1
        if self.shifts and labels is not None:
            labels = _next_tokens(labels, documents, real, from_tokens=labels is rows)
        if "position_ids" not in tensors:
            tensors["position_ids"] = devices.uploaded(_positions_in(documents), rows.device)
        axis = self.bound()
        size = axis_size(axis)
        pieces = 2 * size if self.method == "ring" and size > 1 else size
        full = -(-length // pieces) * pieces
        balanced = self.method == "ring" and _balances(self.window, full // size)
        local = positions(full, axis, balanced=balanced, device=rows.device)
        inputs: dict[str, Any] = {name: _padded(x, full, 0)[:, local] for name, x in tensors.items()}
        if "use_cache" in self.parameters:  # which transformers would make by default
            inputs["use_cache"] = False
        ids = _padded(documents.where(real, 0), full, 0)[:, None]
        inputs["attention_mask"] = ids if described or full > length else ids[:, :0]  # known without its numbers
        return inputs, None if labels is None else _padded(labels, full, IGNORED)[:, local]

    def bound(self) -> AxisName:
        """The axis, or `()` where no mesh with it is in scope."""
        return _bound(self.axis)

    def refuse(self, kwargs: Mapping[str, Any], method: str) -> None:
        """Raises TypeError for a call that a model does not support while its rows are sharded."""
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
        if getattr(attention_mask, "ndim", 0) != 3 or getattr(places, "ndim", 0) != 2:
            raise TypeError(
                f"{where}, attention_mask and position_ids must be those of whole rows. Write inputs, labels = "
                f"model.cut(batch), then model(params, **inputs)"
            )

    def probe(
        self, module: Any, device: torch.device, dtype: torch.dtype | None, run: Callable[[dict[str, Any]], Any]
    ) -> None:
        """Raises ValueError if the model mixes positions other than by attention, or returns what is not by token.

        Attention gives each query its own value. So if the embedding of one position is not a number, all others are.
        """
        table = module.get_input_embeddings().weight
        embedded = torch.arange(_PROBED * table.shape[-1], device=device).cos().view(1, _PROBED, -1)
        embedded = embedded.to(dtype or table.dtype)
        embedded[:, _POISONED] = torch.nan
        kwargs = {"inputs_embeds": embedded, "position_ids": torch.arange(_PROBED, device=device)[None]}
        modes = [Slot(vars(m), "training", "training") for m in module.modules()]
        token = _probing.set(True)
        try:
            with torch.no_grad(), placed(modes, [False] * len(modes)):
                out = run({**kwargs, "use_cache": False} if "use_cache" in self.parameters else kwargs)
        finally:
            _probing.reset(token)
        finite = [i for i in range(_PROBED) if i != _POISONED]
        for x in Forms().flatten(out)[0]:
            if not isinstance(x, Tensor) or not x.is_floating_point():
                continue
            dim = next((d for d in (1, 0) if x.ndim > d and x.shape[d] == _PROBED), None)
            if dim is None:
                raise ValueError(
                    f"{self.name}: returns a value of shape {tuple(x.shape)} for {_PROBED} tokens, which is not by "
                    f"token, such as a pooled one: no rank has whole rows. Take the model without its pooling head"
                )
            if not x.index_select(dim, torch.tensor(finite, device=x.device)).isfinite().all():
                raise ValueError(
                    f"{self.name}: mixes positions by other operations than attention, such as convolutions or "
                    f"recurrences, which would not see the pieces of other ranks. Make the model without context="
                )
        self.probed = True


def _models(module: nn.Module) -> list[Any]:
    """The models of `transformers` inside a module, itself included."""
    return [m for m in module.modules() if of_transformers(m)]


def _bound(axis: str) -> AxisName:
    mesh = current_mesh()
    return axis if mesh is not None and axis in (mesh.mesh_dim_names or ()) else ()


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


def _positions_in(documents: Tensor) -> Tensor:
    """The position of each token in its document."""
    places = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - places.where(begins, 0).cummax(1).values


def _next_tokens(labels: Tensor, documents: Tensor, real: Tensor, from_tokens: bool) -> Tensor:
    """The label of the next token, for each token; `from_tokens`, none across documents and around padding."""
    shifted = _padded(labels[:, 1:], labels.shape[1], IGNORED).clone()
    if from_tokens:
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
    if _probing.get():
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
) -> Mask:
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
    if _probing.get():
        return Mask()
    size = axis_size(_bound(axis))
    if attention_mask is not None and attention_mask.ndim == 3:
        if not attention_mask.shape[1]:
            return Mask(causal, window)
        ids, padding = attention_mask[:, 0], attention_mask[:, 0] == 0
        known = dispatch.readable(ids) and not planned()  # otherwise, as in a compiled step, masks depend on no values
        packed = not known or bool((ids > 1).any())
        return Mask(causal, window, ids if packed else None, padding if not known or bool(padding.any()) else None)
    if size > 1 or q_length != kv_length:
        raise ValueError(
            f"{where}: attention_mask must be that of whole rows where {axis!r} shards them. Write inputs, labels = "
            f"model.cut(batch), then model(params, **inputs)"
        )
    return Mask(causal, window, documents, None if attention_mask is None else ~attention_mask)


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
