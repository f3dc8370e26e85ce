"""The state of a translation: rows, one for each key, and facts, each with the keys that said it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardfn.quoting import listed
from shardfn.translate.values import SourceCall, TranslateError, is_open, shown

Status = Literal["becomes", "always", "yours", "missing", "open", "unknown"]
UNTRANSLATED: tuple[Status, ...] = ("missing", "open", "unknown")
_REPLICATED = {"full_shard": "hybrid_shard", "shard_grad_op": "hybrid_shard_zero2"}


@dataclass(frozen=True)
class Row:
    """One key: its value, and what becomes of it.

    Attributes:
        key: its path in the file, `"zero_optimization.stage"`.
        value: its value in the file, as text.
        status: `"becomes"`: it becomes lines of the program; `"always"`: shardfn always does so; `"yours"`: it is
            outside the program and does not change its results; `"missing"`: it is not translated, and changes results
            or memory; `"open"`: its value is not in the file; `"unknown"`: it is no key of that system.
        text: what it becomes, or why it has no meaning.
    """

    key: str
    value: str
    status: Status
    text: str


@dataclass(frozen=True)
class Translation:
    """The result of `translate`.

    Attributes:
        path: the path of the file.
        system: the system whose configuration it is.
        rows: one for each key, in the order in which they were read.
        program: the lines of shardfn, a Python program fragment.
        names: the names that you must define for the fragment, with their meanings.
    """

    path: str
    system: str
    rows: tuple[Row, ...]
    program: str
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all that changes results or memory is translated."""
        return all(row.status not in UNTRANSLATED for row in self.rows)


class UndefinedName(str):
    """Code for a value that is not in the file: a name that the reader defines."""


class TranslationBuilder:
    """The state of a translation: facts by name with the keys that said them, rows, and names to define."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}
        self.keys: dict[str, tuple[str, ...]] = {}
        self.rows: list[Row] = []
        self.names: dict[str, str] = {}

    def say(self, fact: str, value: Any, *keys: str) -> None:
        """Adds a fact.

        Raises:
            TranslateError: it contradicts what another key said.
        """
        if fact in self.facts and self.facts[fact] != value:
            earlier = ", ".join(self.keys_for_facts(fact)) or "the default"
            raise TranslateError(
                f"{listed(keys)} and {earlier} contradict each other: {shown(value)} and {shown(self.facts[fact])}"
            )
        self.put(fact, value, *keys)

    def put(self, fact: str, value: Any, *keys: str) -> None:
        """Sets a fact, whatever it was before; its earlier keys stay as well."""
        self.facts[fact] = value
        self.keys[fact] = tuple(dict.fromkeys((*self.keys_for_facts(fact), *keys)))

    def row(self, key: str, value: Any, status: Status, text: str) -> None:
        """Adds a row."""
        self.rows.append(Row(key, shown(value), status, text))

    def open(self, key: str, value: Any, then: str = "") -> None:
        """Adds the row of a key whose value is not in the file; `then` says what it would become."""
        self.row(key, value, "open", "its value is not in the file" + (f"; {then}" if then else ""))

    def settings(self, key: str, value: Any) -> dict[str, Any] | None:
        """The contents of a mapping or a call; None if there are none, or they are not in the file.

        Raises:
            TranslateError: the value is neither.
        """
        value = value.arguments if isinstance(value, SourceCall) else value
        if isinstance(value, Mapping):
            return dict(value)
        if is_open(value):
            self.open(key, value, "it is a mapping of keys")
        elif value is not None:
            raise TranslateError(f"{key}: {shown(value)} is not a mapping of keys")
        return None

    def name(self, name: str, about: str) -> UndefinedName:
        """A name that the reader of the program must define."""
        self.names[name] = about
        return UndefinedName(name)

    def get(self, fact: str, default: Any = None) -> Any:
        """The value of a fact, or the default."""
        return self.facts.get(fact, default)

    def keys_for_facts(self, *facts: str) -> tuple[str, ...]:
        """The keys that said any of these facts."""
        return tuple(dict.fromkeys(key for fact in facts for key in self.keys.get(fact, ())))


def derive_facts(draft: TranslationBuilder) -> None:
    """Derives the facts that follow from others.

    Raises:
        TranslateError: sizes of the mesh, or of the batch, contradict each other.
    """
    draft.facts.setdefault("cut", "ddp")
    if draft.get("hpz"):
        draft.put("cut", "hpz", *draft.keys_for_facts("hpz"))
        draft.put("shard", draft.get("hpz"), *draft.keys_for_facts("hpz"))
    if draft.get("mics"):
        draft.put(
            "cut",
            "mics" if draft.get("hierarchical") else "hybrid_shard",
            *draft.keys_for_facts("mics", "hierarchical"),
        )
        draft.put("shard", draft.get("mics"), *draft.keys_for_facts("mics"))
    replicas, shards = draft.get("dp_replicate") or 1, draft.get("dp_shard") or 1
    if replicas > 1 or draft.get("hybrid"):
        draft.put("cut", _REPLICATED.get(draft.get("cut"), draft.get("cut")), *draft.keys_for_facts("dp_replicate"))
    for fact, size, source in (("replica", replicas, "dp_replicate"), ("shard", shards, "dp_shard")):
        if size > 1:
            draft.say(fact, size, *draft.keys_for_facts(source))
    ranks, machines = draft.get("ranks"), draft.get("machines", 1)
    if draft.get("cut").startswith("hybrid") and "replica" not in draft.facts and draft.keys_for_facts("ranks"):
        if ranks % machines:
            raise TranslateError(f"num_processes: {ranks} does not divide by num_machines: {machines}")
        draft.say("replica", machines, *draft.keys_for_facts("machines"))
    product = replicas * shards * draft.get("tensor", 1)
    if ranks and draft.keys_for_facts("dp_replicate", "dp_shard") and product != ranks:
        raise TranslateError(f"parallelism_config: its sizes make {product} ranks, and num_processes is {ranks}")
    if draft.get("by_value") and "clip" in draft.facts:
        draft.say("clip_value", draft.facts.pop("clip"), *draft.keys_for_facts("clip", "by_value"))
    if {"fixed", "scale", "growth_interval"} & set(draft.facts):
        draft.facts.setdefault("scaled", True)
    _batches(draft)


def _batches(draft: TranslationBuilder) -> None:
    """Checks the product rule: rows of a step = ranks x micro-batches x rows of one."""
    total, micro, count = (draft.get(fact) for fact in ("train_batch", "micro_batch", "accumulate"))
    if total is None or not all(isinstance(n, (int, type(None))) for n in (total, micro, count)):
        return
    ranks = draft.get("ranks") and draft.get("ranks") // draft.get("tensor", 1)
    parts = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": count, "ranks": ranks}
    factors = {name: n for name, n in parts.items() if n}
    if total % math.prod(factors.values()) or (len(factors) == 3 and total != math.prod(factors.values())):
        product = listed(f"{name} {n}" for name, n in factors.items())
        raise TranslateError(f"train_batch_size: {total} is not the product of {product} and unknown factors")
