"""What optimizers of other systems are called here, which arguments they take, and their defaults there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardfn.translate.draft import Draft
from shardfn.translate.schema import Section, Table, always, each, missing, read, sets
from shardfn.translate.values import TranslateError, number, on, pair, shown

_ADAM = "lr betas eps weight_decay"
TAKES = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "lion": "lr betas weight_decay",
    "sgd": "lr momentum weight_decay nesterov",
    "torch.optim.Adagrad": "lr lr_decay weight_decay initial_accumulator_value eps",
    "torch.optim.Adadelta": "lr rho eps weight_decay",
    "torch.optim.RMSprop": "lr alpha eps weight_decay momentum centered",
    "torch.optim.NAdam": "lr betas eps weight_decay momentum_decay decoupled_weight_decay",
    "torch.optim.RAdam": "lr betas eps weight_decay decoupled_weight_decay",
    "torch.optim.Adamax": "lr betas eps weight_decay",
}
_READERS: dict[str, Any] = {"betas": pair, **each("nesterov centered decoupled_weight_decay", on)}
# Arguments of theirs that are none here.
_OTHERS: Table = {
    "torch_adam": always("one implementation on each tier"),
    "adam_w_mode": always("whether it is so.adamw or so.adam"),
    "bias_correction": missing("it is always there", "True"),
    "amsgrad": missing("so.from_torch(torch.optim.AdamW, amsgrad=True, ...)", "False"),
    "fp32_optimizer_states": missing("state has the dtype of the parameters' shards, float32 here", "True"),
    "dampening": missing("so.from_torch(torch.optim.SGD, dampening=...)", "0", "0.0"),
    "maximize": missing("the loss with the other sign", "False"),
    "fused": always("torch's fused kernels where there are any"),
    "foreach": always("torch's fused kernels where there are any"),
    "set_grad_none": always("gradients are values"),
    "amp": always("see fp16"),
}


@dataclass(frozen=True)
class Kind:
    """An optimizer of another system: ours, the defaults there that are others here, and notes on its arguments."""

    ours: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """What it becomes."""
        return f"so.from_torch({self.ours}, ...)" if "." in self.ours else f"so.{self.ours}"


def named(key: str, value: Any, kind: str, example: str) -> str:
    """The type, or name, of an optimizer or a scheduler.

    Raises:
        TranslateError: it has none.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get(kind), str):
        raise TranslateError(f"{key}: {shown(value)} has no {kind}, such as {example}")
    return str(value[kind])


def unread(draft: Draft, key: str, kind: str, prefix: str, given: Mapping[str, Any]) -> None:
    """Rows of an optimizer, or of its like, that is not there, or not said."""
    said = "the program has the name optimizer for yours"
    if kind.lower() == "auto":
        draft.row(key, kind, "open", f"its value is not in the file: {said}")
    else:
        near = "; Muon of theirs scales and groups parameters otherwise than so.muon" if kind.lower() == "muon" else ""
        draft.row(key, kind, "missing", f"not there{near}: {said}")
    for name, one in given.items():
        draft.row(f"{prefix}{name}", one, "open", "an argument of that optimizer")


def arguments(draft: Draft, key: str, given: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """Reads the arguments of an optimizer, below a key; with its defaults they are a fact."""
    takes = TAKES[kind.ours].split()
    table: dict[str, Any] = {} if "." in kind.ours else dict(_OTHERS)
    for name in takes:
        text = f"b1= and b2= of so.{kind.ours}" if name == "betas" else f"{name}= of the optimizer"
        said = {f"optimizer.{name}": _READERS.get(name, number)}
        table[name] = sets(text + kind.notes.get(name, ""), name=name, about=f"of the optimizer, {name}", **said)
    read(draft, key, given, Section(table, kind.ours))
    facts = {name: f"optimizer.{name}" for name in (*given, *takes) if f"optimizer.{name}" in draft.facts}
    found = {**kind.defaults, **{name: draft.get(fact) for name, fact in facts.items()}}
    if "lr" not in found:
        found["lr"] = draft.name("lr", "the learning rate")
        draft.row(f"{key}.lr", "not said", "open", "the program has the name lr for it")
    draft.put("optimizer_params", found, *draft.of(*facts.values()))
    return found
