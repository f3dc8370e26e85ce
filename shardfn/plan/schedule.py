"""A step as a value: the work that one rank does, in order, and the memory that it holds meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Work:
    """Consecutive operations of one kind, on one stream, for one stage and pass; or one collective, or one copy.

    Attributes:
        kind: `"compute"`, a collective as the ledger names it (`"all_gather"`, ...), or `"copy"` between host and
            device.
        stage: the path of the stage that it serves; `""` outside of stages.
        phase: `"forward"`, `"backward"`, `"recompute"` or `"update"`.
        stream: on which queue of the device it runs. Works of a stream run one after another.
        after: positions, in the plan, of works of other streams that end before it begins.
        launches: how many operations.
        flops: floating-point operations, by dtype of the operands, as torch counts them.
        moved: bytes of device memory that its operations read and write.
        axis: of a collective: the mesh axes it runs along.
        ranks: of a collective: how many ranks take part.
        nodes: of a collective: over how many nodes they are spread.
        dtype: of a collective: what travels, such as `"bfloat16"`.
        sent: of a collective: bytes that this rank sends, each piece counted once, as the ledger counts them. Of a
            copy: its bytes.
        scheduled: of a collective: whether it is issued ahead of need, so that computation may run meanwhile.
        where: `file:line` of the user's code.
    """

    kind: str
    stage: str = ""
    phase: str = "forward"
    stream: int = 0
    after: tuple[int, ...] = ()
    launches: int = 0
    flops: dict[str, int] = field(default_factory=dict)
    moved: int = 0
    axis: tuple[str, ...] = ()
    ranks: int = 1
    nodes: int = 1
    dtype: str = ""
    sent: int = 0
    scheduled: bool = False
    where: str = ""

    @property
    def collective(self) -> bool:
        """Whether it is a collective: one of parameters outside of `shard_map` may be along axes without a name."""
        return self.kind not in ("compute", "copy")


@dataclass(frozen=True)
class Held:
    """The bytes that this rank holds by kind, at the moment within a work at which they are the most.

    Attributes:
        at: the work's position in the plan.
        kinds: `"parameters"`, `"optimizer"` and the like by the names of the step's arguments; `"gathered"`, the
            buffers of stages; `"reducing"`, those of gradients on their way; `"gradients"`; `"activations"`, what
            backward needs; `"transients"`, all else.
    """

    at: int
    kinds: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class Allocation:
    """Tensors that are held at the peak, made at one line.

    Attributes:
        kind: as in `Held`.
        where: `file:line` of the user's code that made them, or the argument's path.
        stage: the stage in which they were made.
        count: how many.
        bytes: of all of them.
    """

    kind: str
    where: str
    stage: str
    count: int
    bytes: int
