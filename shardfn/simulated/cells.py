"""Formulas of fused recurrent cells (GRU, LSTM), for which only CUDA has kernels, and fake tensors no rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten: Any = torch.ops.aten


def _gru(inputs: Tensor, hidden: Tensor, h: Tensor, *biases: Tensor | None) -> tuple[Tensor, Tensor]:
    """A step of a GRU: the state after it, and what backward needs."""
    own, other = _gates((inputs, hidden), biases, 3)
    reset, update = torch.sigmoid(own[0] + other[0]), torch.sigmoid(own[1] + other[1])
    new = torch.tanh(own[2] + reset * other[2])
    return new + update * (h - new), torch.cat([reset, update, new, h, other[2]], -1)


def _gru_backward(ct: Tensor, kept: Tensor, has_bias: bool) -> tuple[Tensor | None, ...]:
    reset, update, new, h, hidden = kept.chunk(5, -1)
    to_update = ct * (h - new) * (1 - update) * update
    to_new = ct * (1 - update) * (1 - new * new)
    to_reset = to_new * hidden * (1 - reset) * reset
    inputs = torch.cat([to_reset, to_update, to_new], -1)
    state = torch.cat([to_reset, to_update, to_new * reset], -1)
    biases = (inputs.sum(0), state.sum(0)) if has_bias else (None, None)
    return inputs, state, ct * update, *biases


def _lstm(inputs: Tensor, hidden: Tensor, c: Tensor, *biases: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """A step of an LSTM: both states after it, and what backward needs."""
    own, other = _gates((inputs, hidden), biases, 4)
    enter, forget, new, out = (x + y for x, y in zip(own, other, strict=True))
    enter, forget, new, out = enter.sigmoid(), forget.sigmoid(), new.tanh(), out.sigmoid()
    after = forget * c + enter * new
    return out * after.tanh(), after, torch.cat([enter, forget, new, out], -1)


def _lstm_backward(
    of_h: Tensor | None, of_c: Tensor | None, c: Tensor, after: Tensor, kept: Tensor, has_bias: bool
) -> tuple[Tensor | None, ...]:
    enter, forget, new, out = kept.chunk(4, -1)
    of_h, of_c = (torch.zeros_like(c) if ct is None else ct for ct in (of_h, of_c))
    shown = after.tanh()
    of_c = of_c + of_h * out * (1 - shown * shown)
    gates = [
        of_c * new * (1 - enter) * enter,
        of_c * c * (1 - forget) * forget,
        of_c * enter * (1 - new * new),
        of_h * shown * (1 - out) * out,
    ]
    all_gates = torch.cat(gates, -1)
    return all_gates, of_c * forget, all_gates.sum(0) if has_bias else None


def _gates(each: tuple[Tensor, Tensor], biases: tuple[Tensor | None, ...], count: int) -> list[tuple[Tensor, ...]]:
    """The gates' values from the input and from the state, with the bias of each if there is one."""
    added = biases or (None, None)
    return [(x if b is None else x + b).chunk(count, -1) for x, b in zip(each, added, strict=True)]


FORMULAS: dict[Any, Callable[..., Any]] = {
    _aten._thnn_fused_gru_cell.default: _gru,
    _aten._thnn_fused_gru_cell_backward.default: _gru_backward,
    _aten._thnn_fused_lstm_cell.default: _lstm,
    _aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_backward,
}
