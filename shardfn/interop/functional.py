"""Turns a module into a pure function of a tree of parameters, with a stage for each of its layers."""

from __future__ import annotations

import difflib
import inspect
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import optree
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardfn.collectives.functional import axis_size
from shardfn.compat import dispatch, dynamo, functorch
from shardfn.interop.batch_norm import in_one_dtype, is_batch_norm, keeps_statistics, synchronized
from shardfn.interop.context_parallel import ContextParallel, Method
from shardfn.interop.conversions import of_transformers, register_batches, stretches_rope
from shardfn.interop.generation import gathered_once
from shardfn.interop.in_place import (
    Adapting,
    along_tensor,
    arguments,
    loose_in_place,
    replaced,
    unasked,
    uncached,
    unstaged_parameters,
)
from shardfn.interop.module_state import Attributes, undone
from shardfn.interop.partition import LOOSE, Anatomy, Boundaries, options_by_stage, taken_apart
from shardfn.interop.placeholder import HOOKED, ModulePart, Placeholder, Slot, revealed
from shardfn.interop.pytrees import Forms
from shardfn.interop.refusals import (
    drawn_layers,
    refuse_apart,
    refuse_checkpointing,
    refuse_inside_function,
    refuse_mixed_loose,
    refuse_router_loss,
    refuse_written_outside,
)
from shardfn.interop.stage_module import ModuleCall, Shell, StageUnit, casting
from shardfn.interop.tensor_checks import ShardedModules
from shardfn.interop.tensor_parallel import TensorParallel
from shardfn.interop.tensor_plan import Table, TensorPlan, apply_table
from shardfn.mesh import planned as plans
from shardfn.mesh import waiting
from shardfn.mesh.grid import AxisName
from shardfn.mesh.selectors import Chosen, Which, chosen
from shardfn.mesh.spec import P, joined
from shardfn.quoting import listed
from shardfn.shards.layout import FlatShard, Layout, flat_shards
from shardfn.shards.placement import Strategy
from shardfn.shards.sharding import Specs, shard
from shardfn.shards.unsharding import unshard
from shardfn.stages.stage import layers, stage
from shardfn.tracebacks import api_boundary

SMALL = 2**14  # parameters


@api_boundary
def functional(
    module: nn.Module,
    stages: Boundaries | None = None,
    *,
    min_num_params: int | None = None,
    unstaged: Which = (),
    mutable_buffers: Which = (),
    min_stage_params: int = SMALL,
    sync_batch_norm: AxisName | None = None,
    tensor: Table | Literal["auto"] | None = None,
    tensor_axis: str = "tensor",
    context: str | None = None,
    context_attention: Method = "ring",
    compile: bool | Mapping[str, Any] = False,  # torch's name for it
    **stage_options: Any,
) -> Functional:
    """Takes the parameters out of a module, which becomes a pure function of them, with a stage for each layer.

    Afterwards the module itself is a shell: its own code runs, unchanged, with the parameters of a call in their
    places. In between it holds placeholders, which know shapes, dtypes and the device, and raise when they are computed
    with.

    Args:
        module: any `torch.nn.Module` of dense parameters, those of `transformers` among them; on the meta device, or
            built inside `meta`, if it is to be loaded later.
        stages: which modules are stages: classes or their names (`{"LlamaDecoderLayer"}`), regular expressions of whole
            paths (`r"model\\.layers\\.\\d+"`), or a function `(path, module) -> bool`. The outermost match wins.
            Default: `_no_split_modules` of all models inside; if there are none, the items of each `ModuleList` and
            `Sequential`. Of the rest the largest modules become stages too. A dict from such names, classes or
            expressions to options, `{"LlamaDecoderLayer": dict(remat=True)}`, gives stages options of their own: the
            first item that matches a stage counts. What it matches are stages; where nothing matches, the default's.
        min_num_params: instead of `stages`: the smallest modules that hold as many parameters.
        unstaged: which parameters belong to no single stage, by patterns for their paths: they are gathered at the
            start of a call, and kept. For those that a module reads from another, as `F.linear(x, self.embed.weight)`,
            this saves a further gather of the whole stage.
        mutable_buffers: which buffers the module changes in forward, by patterns; those of batch norms are known.
        min_stage_params: modules with fewer parameters than this are no stages, unless they were chosen.
        sync_batch_norm: the axes over which a batch is sharded: batch norms use the statistics of all of it.
        tensor: how tensor parallelism cuts layers: a table of ends of module paths -> words, such as `interop.LLAMA`
            and `interop.GPT2`; or "auto", the table that the model's classes ship.
        tensor_axis: the mesh axis that cuts them; if the mesh has no such axis, they are whole.
        context: the mesh axis that shards the sequence of a model of `transformers`; `model.cut` makes its arguments.
            If the mesh has no such axis, sequences are full. The configuration is copied, as its attention changes.
        context_attention: "ring", for sequences that `model.cut` balances, or "ulysses".
        compile: True, or the arguments of `torch.compile`, by which the forward of each stage is compiled.
        stage_options: `remat`, `reshard`, `prefetch`, `gather_dtype`, ... of `shardfn.stage`, for all stages that
            have none of their own.

    Returns:
        The function `model(params, *args, buffers=None, method="__call__", **kwargs)`.

    Raises:
        TypeError: the module was taken apart before, is wrapped by FSDP, DDP or accelerate, or checkpoints activations
            by itself; with `context`, it counts positions or computes attention by itself.
        ValueError: patterns or names match nothing.

    Example:
        ``model = functional(transformers.LlamaForCausalLM(config), remat=True)``, then
        ``params = model.shard(mesh, sf.full_shard("shard"))`` and ``model(params, input_ids=tokens).logits``
    """
    _refuse_unknown(stage_options, [*inspect.signature(functional).parameters][2:-1])
    if not isinstance(compile, (bool, Mapping)):
        raise TypeError(f"functional: compile must be True, or a dict of arguments of torch.compile, got {compile!r}")
    if not (sync_batch_norm is None or isinstance(sync_batch_norm, (str, tuple))):
        raise TypeError(
            f"functional: sync_batch_norm must be one or several names of mesh axes, got {sync_batch_norm!r}"
        )
    rules = chosen(unstaged, "unstaged"), chosen(mutable_buffers, "mutable_buffers")
    options: dict[str, Mapping[str, Any]] = {LOOSE: stage_options}
    stage(unstaged_parameters, **stage_options)  # raises for wrong options before the module is changed
    if isinstance(module, nn.Module):
        _changing(module, dict(module.named_buffers(remove_duplicate=False)), rules[1])
        if of_transformers(module):
            register_batches()
    plan = None if tensor is None else apply_table(module, tensor, tensor_axis)
    contextual = None if context is None else ContextParallel(module, context, context_attention)

    def accept(chosen: Mapping[str, nn.Module]) -> None:
        if plan is not None:
            plan.refuse_outside(chosen)
        options.update(options_by_stage(module, stages, chosen, stage_options))
        for own_options in options.values():
            _refuse_unknown(own_options)
            stage(unstaged_parameters, **own_options)

    anatomy = taken_apart(
        module, stages, min_num_params, min_stage_params, rules[0], stage_options.get("gather_dtype"), accept
    )
    if contextual is not None:
        contextual.install(module)
    anatomy.place.dtypes.update({path: own_options.get("gather_dtype") for path, own_options in options.items()})
    return Functional(module, anatomy, rules[1], sync_batch_norm, plan, contextual, compile, options)


def _refuse_unknown(options: Mapping[str, Any], more_names: Sequence[str] = ()) -> None:
    """Raises TypeError for what is no option of a stage; `more_names` are arguments that might have been meant."""
    unknown = sorted(set(options) - _STAGE_OPTIONS)
    if unknown:
        names = [*more_names, *sorted(_STAGE_OPTIONS)]
        close = difflib.get_close_matches(unknown[0], names, 1)
        hint = f" (did you mean {close[0]}=?)" if close else ""
        raise TypeError(
            f"functional: unknown option {listed(unknown)}{hint}. Pass one of {', '.join(names)}; of these "
            f"{', '.join(sorted(_STAGE_OPTIONS))} are options of shardfn.stage"
        )


def _with_parameters(out: Any) -> Any:
    """A module's result with values in place of the placeholders of parameters that it returns."""
    forms = Forms()
    leaves, form = forms.flatten(out)
    if not any(isinstance(x, Placeholder) for x in leaves):
        return out  # the object itself, whatever it is
    return forms.unflatten([revealed(x) for x in leaves], form)


def expect_functional(where: str, model: Any) -> None:
    """Raises TypeError if `model` is not a `Functional`, as when arguments are in the wrong order."""
    if not isinstance(model, Functional):
        raise TypeError(f"{where}: model is of type {type(model).__name__}, not what interop.functional returns")


_STAGE_OPTIONS = {
    "remat", "reshard", "prefetch", "gather_dtype", "reduce_dtype", "gather_format", "reduce_format", "input_dtype",
    "output_dtype",
}  # fmt: skip


class Functional:
    """A module as a function of parameters; made by `functional`.

    Attributes:
        tree: the parameters that the module had: a dict of stage path -> {name: tensor}. `shard` cuts it, as does any
            other function that makes parameters of the same structure. Delete it, `del model.tree`, once it is not
            needed any more.
        frozen: patterns of parameters that need no gradient, as `shardfn.shard(frozen=...)` takes them.
        buffers: by name, as the module had them.
        names: every name that the module has for a parameter -> its name in the tree; they differ for tied parameters.
        module: the shell.
        stages: paths of the stages.
        specs: how `tensor` cuts parameters, as `shardfn.shard(specs=...)` takes it.
    """

    def __init__(
        self,
        module: nn.Module,
        anatomy: Anatomy,
        mutable: Chosen,
        sync_batch_norm: AxisName | None,
        plan: TensorPlan | None,
        context: ContextParallel | None,
        compile: bool | Mapping[str, Any],
        options: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self.module, self.tree, self.frozen = module, anatomy.tree, anatomy.frozen
        self.buffers, self.names, self.stages = anatomy.buffers, anatomy.names, tuple(anatomy.parts)
        self._keys = frozenset(anatomy.tree)
        if plans.planned():  # modules are built on the host
            plans.notes().on_host(optree.tree_leaves(anatomy.tree))
        self._shapes = {
            key: {
                joined(key, name): tuple(x.shape)
                for name, x in (part.items() if isinstance(part, dict) else [("", part)])
            }
            for key, part in anatomy.tree.items()
        }
        self._fitting: dict[int, Layout] = {}
        self._loose, self._place = anatomy.loose, anatomy.place
        self._adapting = Adapting(self._loose)
        self._same, self._places = anatomy.same, dict[str, list[Slot]]()
        for slot in anatomy.loose.buffers:
            self._places.setdefault(slot.key, []).append(slot)
        self._held = {key: slots[0].holder[slots[0].at] for key, slots in self._places.items()}
        self._changing = {self._same[name]: m for name, m in _changing(module, anatomy.buffers, mutable).items()}
        self._checkpointing = [(path, m) for path, m in module.named_modules() if hasattr(m, "gradient_checkpointing")]
        self._drawn, self._skeleton = drawn_layers(module), _skeleton(module)
        self._placeholders = [p for p in module.parameters() if isinstance(p, Placeholder)]
        stretched = {path for path, m in module.named_modules() if stretches_rope(m)}
        stretched_buffers = {self._same[name] for name in anatomy.buffers if name.rpartition(".")[0] in stretched}
        self._kept = stretched_buffers - set(self._changing)
        self._attributes = Attributes(module.modules())
        self._looked: set[bool] = set()
        self._running, self._lock = self._place.running, threading.RLock()
        self._order: tuple[str, ...] = ()
        # Copies of buffers on another device: the buffer, its version and the copy's device, and the copy.
        self._elsewhere: dict[str, tuple[Tensor, Any, Tensor]] = {}
        self._instead: dict[nn.Module, Callable[..., Any]] = {
            m: in_one_dtype(m)
            for m in module.modules()
            if is_batch_norm(m) and any("gather_dtype" in own_options for own_options in options.values())
        }
        if sync_batch_norm is not None:
            self._instead = {m: synchronized(m, sync_batch_norm) for m in module.modules() if is_batch_norm(m)}
        self._plan, self._context = plan, context
        self.specs: Specs = P() if plan is None else plan.spec
        self._tensor = None if plan is None else TensorParallel(plan)
        if self._tensor is not None:
            self._instead |= self._tensor.forwards
        shell = Shell(self._running, self._places, frozenset(self._changing))
        self._units = {path: self._unit(shell, part, compile, options[path]) for path, part in anatomy.parts.items()}
        inside = {m for unit in self._units.values() for m in unit.part.module.modules()}
        common = options[LOOSE]
        self._around = self._loose_forwards(inside, common.get("input_dtype"), common.get("output_dtype"))
        self._casts = {name: common.get(name) for name in ("gather_dtype", "input_dtype")}
        self._region = self._region_of("", set(module.modules()) - inside)
        self._fresh, self._unasked = uncached(module), unasked(module)
        self._reveals = {
            path: stage(
                unstaged_parameters,
                gather_dtype=own_options.get("gather_dtype"),
                reduce_dtype=own_options.get("reduce_dtype"),
            )
            for path, own_options in options.items()
        }

    def _loose_forwards(
        self, inside: Container[nn.Module], input_dtype: torch.dtype | None, output_dtype: torch.dtype | None
    ) -> dict[nn.Module, Callable[..., Any]]:
        """Forward overrides for modules outside any stage; those with parameters cast as stages do."""
        around = {m: forward for m, forward in self._instead.items() if m not in inside}
        if input_dtype or output_dtype:
            holder_ids = {id(slot.holder) for slot in (*self._loose.own, *self._loose.shared)}
            loose = [m for m in self.module.modules() if m not in inside and id(m._parameters) in holder_ids]
            around |= {m: casting(around.get(m, m.forward), input_dtype, output_dtype) for m in loose}
        return around

    def _unit(
        self, shell: Shell, part: ModulePart, compile: bool | Mapping[str, Any], options: Mapping[str, Any]
    ) -> StageUnit:
        inside = list(part.module.modules())
        instead = {m: self._instead[m] for m in inside if m in self._instead}
        return StageUnit(shell, part, self._region_of(part.path, inside), instead, compile, options)

    def _region_of(self, path: str, modules: Iterable[nn.Module]) -> ShardedModules | None:
        return None if self._tensor is None else self._tensor.region(path, modules)

    def __call__(
        self,
        params: Any,
        /,
        *args: Any,
        buffers: Mapping[str, Tensor] | None = None,
        adapters: Mapping[str, Any] | None = None,
        method: str = "__call__",
        **kwargs: Any,
    ) -> Any:
        """Calls the module with these parameters.

        Args:
            params: of the structure of `tree`: flat shards, whole tensors, or both.
            args: passed to the module, like `kwargs`.
            buffers: values of buffers by name; missing ones are as the module had them.
            adapters: made by `shardfn.lora` for this model: flat shards, whole tensors, or both.
            method: the method of the module to call, such as `"generate"`.
            kwargs: passed to the module.

        Returns:
            The module's result; with `buffers`, a pair of it and the buffers afterwards.

        Raises:
            ValueError: the parameters differ from those of `tree`; or buffers would change and were not passed.
            RuntimeError: a parameter, or a buffer that is not in `mutable_buffers`, is written to.
            TypeError: a cache of keys and values is used while gradients are recorded.
        """
        dynamo.refuse_compiling(f"a call of {type(self.module).__name__}")
        self._check(params)
        if self._context is not None:
            self._context.refuse(self.module, kwargs, method)
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                f"{type(self.module).__name__} is called by two threads at once: a call puts its parameters into the "
                f"module, so threads need a module and a function of it each, or a lock"
            )
        try:
            out = self._called(params, args, kwargs, buffers, adapters or {}, method)
            self._probe(params, buffers, adapters or {})
            return out
        finally:
            self._lock.release()

    def _probe(self, params: Any, buffers: Mapping[str, Tensor] | None, adapters: Mapping[str, Any]) -> None:
        """Checks once that `context` is right for the model, where tensors have values."""
        context = self._context
        if context is None or context.probed or axis_size(context.bound()) == 1 or self._running.now is not None:
            return
        tensors = [x for x in optree.tree_leaves(params) if isinstance(x, Tensor)]
        if functorch.inside_transform() or not all(dispatch.plain(x) and not x.is_meta for x in tensors):
            return

        def run(kwargs: dict[str, Any]) -> Any:
            out = self._called(params, (), kwargs, buffers, adapters, "__call__")
            return out if buffers is None else out[0]

        order = self._order
        context.probe(self.module, self._place.device, self._casts["gather_dtype"], run)
        self._order = order

    def _called(
        self,
        params: Any,
        args: Any,
        kwargs: dict[str, Any],
        buffers: Mapping[str, Tensor] | None,
        adapters: Mapping[str, Any],
        method: str,
    ) -> Any:
        self._check_adapters(adapters)
        if self._running.now is None:
            self._refuse_altered()
        changing = self._changing_now(buffers)
        refuse_checkpointing(self.module, self._checkpointing)
        if self._running.now is None:
            refuse_apart(self.module, self._drawn, params)
        tensors = (x for x in optree.tree_leaves(params) if isinstance(x, Tensor))
        self._place.device = next((x.device for x in tensors), self._place.device)
        passed_buffers = self._given_buffers(buffers or {}, self._place.device)
        module_buffers = self._own_buffers(self._place.device)
        values = {**module_buffers, **{key: b for key, b in passed_buffers.items() if key not in self._kept}}
        if method == "generate":
            if _all_ranks_run(params):
                kwargs.setdefault("synced_gpus", True)
            params = self._gathered_once(params)
        records = Functional._called.__code__ if torch.is_grad_enabled() else None
        run = ModuleCall(params, frozenset(changing | self._kept), adapters, records, self._revealed)
        parts = arguments(params, self._loose, adapters)
        loose, *adapted = self._reveals[LOOSE](*parts) if self._loose.own or self._loose.shared else ({},)
        announced = self._announced(params, adapters)
        before, self._running.now = self._running.now, run
        try:
            with (
                undone(self._attributes),
                replaced("forward", self._around),
                self._fresh(),
                self._unasked(),
                loose_in_place(
                    self._adapting, loose, adapted, values, run.changing, run.lent, self._looks(loose)
                ) as changed,
                along_tensor(self._region, self.module, (*args, *kwargs.values()), self._loose, params) as followed,
            ):
                target = self.module if method == "__call__" else getattr(self.module, method)
                try:
                    out = target(*args, **kwargs)
                except RuntimeError as error:
                    refuse_mixed_loose(error, self.module, loose, self._casts)
                    raise
                out = _with_parameters(out)
                if followed is not None:
                    followed.check(out)
                refuse_written_outside(run.revealed.values())
        finally:
            self._running.now = before
        refuse_router_loss(self.module, out, kwargs)
        self._looked.add(self.module.training)
        self.buffers.update({name: changed[key] for name, key in self._same.items() if key in self._kept})
        del announced  # it is in force as long as it is alive
        self._order = tuple(dict.fromkeys(run.trace))
        if buffers is None:
            return out
        values |= changed
        return out, {name: values[key] for name, key in self._same.items()}

    def cut(self, batch: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Makes this rank's arguments from whole rows, for a model with `context`.

        Rows are padded at the end until ranks have equal pieces. Documents, positions and labels are made before rows
        are sharded: from a piece alone nothing tells where a document begins.

        Args:
            batch: `[b, t]`, the same on all ranks along `context`: `input_ids` or `inputs_embeds`; if there are any,
                `attention_mask`, `position_ids`, `token_type_ids`, `labels`, and `documents`, ids of the documents of
                tokens, one for each run of them. Without `documents`, these begin where `position_ids` jump, as in
                `transformers`.

        Returns:
            The arguments of the call, and the labels: if the module's loss is that of a causal language model, those of
            the next token, made from `input_ids` if there are none; -100 at padding, the end of documents and where
            there is no loss. Divide the sum of losses by the `psum` of the number of labels.

        Raises:
            TypeError: the model has no `context`; the batch has something that is not by token; or labels, where the
                module's loss does not tell whether these are of the next token.
            ValueError: shapes differ, or ranks along `context` have different rows; positions jump in rows that also
                have padding, or are so long that rotary frequencies change; or an id of a document returns.

        Example:
            ``inputs, labels = model.cut({"input_ids": tokens, "documents": ids})``, then
            ``logits = model(params, **inputs).logits``
        """
        if self._context is None:
            raise TypeError("cut: the model must have a context axis, got none. Pass context= to functional")
        return self._context.cut(batch)

    def shard(self, mesh: DeviceMesh, strategy: Strategy, *, frozen: Which | None = None) -> Any:
        """Cuts the parameters that the module had into flat shards, by `shardfn.shard` with this model's options.

        Args:
            mesh: as for `shardfn.shard`.
            strategy: as for `shardfn.shard`.
            frozen: as for `shardfn.shard`; default: the parameters whose `requires_grad` was False.

        Returns:
            The parameters, of the structure of `tree`, also cut as `tensor` says.

        Raises:
            ValueError: `tree` was deleted, or has no values; and as `shardfn.shard`.
        """
        if not hasattr(self, "tree"):
            raise ValueError("shard: model.tree has the parameters, and was deleted: shard before that")
        return shard(self.tree, mesh, strategy, frozen=self.frozen if frozen is None else frozen, specs=self.specs)

    @waiting.during("model.state_dict")
    def state_dict(self, params: Any) -> dict[str, Tensor]:
        """Gathers whole parameters under all of the module's names, including aliases, on every rank.

        Of copies that differ, as between islands of local SGD, each rank gets its own.

        Args:
            params: parameters or gradients of the structure of `tree`.
        """
        self._check(params)
        full: dict[str, Tensor] = {}
        for key, part in params.items():
            values = unshard(part)
            full |= {joined(key, name): x for name, x in values.items()} if isinstance(values, dict) else {key: values}
        return {alias: full[name] for alias, name in self.names.items()}

    def __repr__(self) -> str:
        by_options: dict[str, list[str]] = {}
        for path, unit in self._units.items():
            by_options.setdefault(", ".join(f"{name}={x!r}" for name, x in unit.options.items()), []).append(path)
        lines = [f"\n  {listed(paths, 8)}: {options}" for options, paths in by_options.items() if options]
        return f"Functional({type(self.module).__name__}, {len(self.stages)} stages{''.join(lines)})"

    if not TYPE_CHECKING:  # a type checker would accept any attribute

        def __getattr__(self, name: str) -> Any:
            """Raises AttributeError, with a hint if the module has such an attribute."""
            hint = f"; its module has one: model.module.{name}" if hasattr(self.__dict__.get("module"), name) else ""
            raise AttributeError(f"a Functional has no attribute {name!r}{hint}")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"a function of the shell of {type(self.module).__name__} cannot be copied or pickled: it serves as many "
            f"sets of parameters as you like, so copy or save those"
        )

    def _check(self, params: Any) -> None:
        if not isinstance(params, Mapping):
            raise TypeError(
                f"the parameters of {type(self.module).__name__} are a dict of stages, as `tree` is, not of type "
                f"{type(params).__name__}; where the model is called they are the first argument, model(params, ...)"
            )
        if set(params) != self._keys:
            missing, extra = sorted(self._keys - set(params)), sorted(map(str, set(params) - self._keys))
            raise ValueError(
                f"the parameters of {type(self.module).__name__} have the structure of `tree`, a dict of stages, "
                f"whether they went through shard() or not. Missing: {_some(missing)}; not known: {_some(extra)}"
            )
        for key, part in params.items():
            flats = (part,) if type(part) is FlatShard else part.values() if isinstance(part, dict) else ()
            for flat in flats:
                if type(flat) is FlatShard and id(flat.layout) not in self._fitting:
                    self._compare(key, flat.layout)

    def _compare(self, key: str, layout: Layout) -> None:
        """Raises ValueError if the shapes in this layout differ from the module's."""
        for index, entry in enumerate(layout.entries):
            stored = layout.meant_shape(index)
            named = {name for name in self._shapes[key] if entry.path == name or entry.path.endswith(f".{name}")}
            longest = max(map(len, named), default=0)  # `visual.scale` is not `scale`, if there are both
            for name, shape in self._shapes[key].items():
                if stored != shape and name in named and len(name) == longest:
                    raise ValueError(
                        f"these are not the parameters of this {type(self.module).__name__}: {name} is {list(stored)} "
                        f"there, and {list(shape)} in the module"
                    )
                if self._plan is not None and entry.path == name:
                    self._refuse_whole(self._plan, name, shape, entry.spec, layout)
        self._fitting[id(layout)] = layout

    def _refuse_whole(self, plan: TensorPlan, name: str, shape: tuple[int, ...], spec: P, layout: Layout) -> None:
        """Raises ValueError for a parameter that is whole on all ranks along the axis of `tensor` but should be cut."""
        ranks = dict(layout.grid.sizes).get(plan.axis, 1)
        if ranks > 1 and plan.axis in plan.spec(name, shape).axes and plan.axis not in spec.axes:
            raise ValueError(
                f"{name} of {type(self.module).__name__} is full on each of {ranks} ranks along {plan.axis!r}, where "
                f"tensor= shards it as {plan.spec(name, shape)}. Write params = model.shard(mesh, strategy), or pass "
                f"specs=model.specs to shard"
            )

    def _check_adapters(self, adapters: Mapping[str, Any]) -> None:
        keys = {*self._units, self._loose.path}
        if not isinstance(adapters, Mapping) or not set(adapters) <= keys:
            extra = sorted(set(adapters) - keys) if isinstance(adapters, Mapping) else [type(adapters).__name__]
            raise ValueError(
                f"adapters of {type(self.module).__name__} are a dict of its stages, as shardfn.lora makes it of a "
                f"model with the same stages; not known: {_some(extra)}; its stages are {_some(list(self.stages))}"
            )
        if adapters and self._tensor is not None:
            raise ValueError(
                f"{type(self.module).__name__} is sharded by tensor=, which is not supported with adapters. Make the "
                f"model without tensor="
            )
        for key, part in adapters.items():
            (self._units[key].adapting if key in self._units else self._adapting).check(part)

    def _refuse_altered(self) -> None:
        """Raises RuntimeError if the module was compiled, or has got new modules or parameters, which none would train.

        Layers may have moved: some modules wrap others around the same parameters in their first forward.
        """
        if all(
            tuple(m._modules.values()) == children and _has_no_values(m) and not dynamo.is_compiled(m)
            for m, children in self._skeleton
        ):
            return
        modules = {m for m, _ in self._skeleton}
        for path, m in self.module.named_modules():
            if dynamo.is_compiled(m):
                raise RuntimeError(
                    f"{path or type(m).__name__} was compiled by torch after functional(), which lends it parameters "
                    f"for each call: leave compile() out, and pass compile=True to functional, which compiles each "
                    f"stage, or compile the whole step by shardfn.compile"
                )
            if not (_has_no_values(m) and (m in modules or not m._buffers)):
                raise RuntimeError(
                    f"{path or type(m).__name__} got other parameters or modules after functional(), which knows "
                    f"nothing of them: load weights into the tree, by interop.load or shard(), and change the module "
                    f"before it is taken apart"
                )
        present = {id(p) for m in self.module.modules() for p in m._parameters.values()}
        lost = next((p for p in self._placeholders if id(p) not in present), None)
        if lost is not None:
            raise RuntimeError(
                f"{lost.path} was deleted from the module after functional(), while the parameters still have it: "
                f"change the module before it is taken apart"
            )
        self._skeleton = _skeleton(self.module)

    def _looks(self, loose: Mapping[str, Tensor]) -> bool:
        """Whether to compare the bytes of loose parameters: in the first call in each mode, as stages do."""
        if self.module.training in self._looked:
            return False
        return all(dispatch.plain(x) and not functorch.wrapped(x) and not x.is_meta for x in loose.values())

    def _changing_now(self, buffers: Mapping[str, Tensor] | None) -> set[str]:
        """The keys of the buffers that a call changes.

        Raises:
            ValueError: buffers change and none were given, or the module has no such buffers.
        """
        changing = {key for key, m in self._changing.items() if m is None or m.training}
        if changing and buffers is None:
            raise ValueError(
                f"{type(self.module).__name__} changes buffers while it trains, {listed(sorted(changing), 3)}: "
                f"pass buffers=model.buffers, and take them back: `out, buffers = model(params, x, "
                f"buffers=buffers)`; or call model.module.eval() first"
            )
        if unknown := set(buffers or ()) - set(self.buffers):
            raise ValueError(
                f"{type(self.module).__name__} has no buffer {_some(sorted(unknown))}; its buffers are "
                f"{_some(list(self.buffers))}"
            )
        return changing

    def _own_buffers(self, device: torch.device) -> dict[str, Tensor]:
        """The module's present buffers, on the device of the parameters."""
        around = self._running.now
        for key, (slot, *_) in self._places.items() if around is None else ():
            current = slot.holder[slot.at]
            if current is not self._held[key]:  # the module has assigned another buffer
                self._held[key] = current
                self.buffers.update({name: current for name, own_key in self._same.items() if own_key == key})
        return {key: self._copied_buffer(key, self.buffers[key], device) for key in self._places}

    def _copied_buffer(self, key: str, b: Tensor, device: torch.device) -> Tensor:
        """A buffer on the device of the parameters; copied again if it was written to since."""
        if b.device == device or b.is_meta:
            return b
        state = None if b.is_inference() else b._version, device
        copied = self._elsewhere.get(key)
        if copied is None or copied[0] is not b or copied[1] != state:
            copied = self._elsewhere[key] = b, state, b.to(device)
        return copied[2]

    def _given_buffers(self, buffers: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
        """The buffers given to a call, by key; of several names for one, the first counts."""
        names = sorted(buffers, key=lambda name: self._same[name] == name)
        return {self._same[name]: b if (b := buffers[name]).device == device else b.to(device) for name in names}

    def _revealed(self, run: ModuleCall, read: Placeholder) -> Any:
        """The value of a stage's parameter that other code reads, from a copy of the stage's that the call keeps."""
        unit = self._units.get(read.owner)
        hooked = read.path.endswith(HOOKED) and any(m._forward_pre_hooks for m in self.module.modules())
        if unit is None or read.owner in run.adapters or unit.region is not None or hooked:
            return read
        if run.records is not None and not torch.is_grad_enabled():
            refuse_inside_function(unit.part, run.records, read.path)
        key: Any = read.owner, torch.is_grad_enabled(), object() if functorch.inside_transform() else None
        if key not in run.revealed:
            run.revealed[key], *_ = self._reveals[read.owner](*arguments(run.params, unit.part, {}))
        values = run.revealed[key]
        value = values[read.path if read.path in unit.part.shared_keys() else read.path.removeprefix(f"{read.owner}.")]
        vars(value).update(read.given)
        return value

    def _gathered_once(self, params: Any) -> Any:
        """The parameters for many calls of all stages."""
        rounded = any("gather_format" in unit.options for unit in self._units.values())
        stays_sharded = self._tensor is not None or rounded
        return params if stays_sharded else gathered_once(params, self._reveals)

    def _announced(self, params: Any, adapters: Mapping[str, Any]) -> Any:
        """Announces the stages in the order of the last call; a stage out of order is gathered when it is called."""
        if not self._order:
            return None
        return layers([arguments(params, self._units[path].part, adapters) for path in self._order])


_NO_VALUES = (Placeholder, type(None))


def _has_no_values(m: nn.Module) -> bool:
    return all(type(p) in _NO_VALUES for p in m._parameters.values())


def _skeleton(module: nn.Module) -> list[tuple[nn.Module, tuple[nn.Module | None, ...]]]:
    return [(m, tuple(m._modules.values())) for m in module.modules()]


def _changing(module: nn.Module, buffers: Mapping[str, Tensor], mutable: Chosen) -> dict[str, nn.Module | None]:
    """The buffers that forward changes: always (None), or only while the given module trains.

    Raises:
        ValueError: a pattern matches no buffer.
    """
    if unused := mutable.unused(buffers):
        raise ValueError(
            f"functional: mutable_buffers: nothing matches {listed(map(repr, sorted(unused)))}; buffers are "
            f"{_some(list(buffers))}"
        )
    result: dict[str, nn.Module | None] = {name: None for name, b in buffers.items() if mutable(name, b.shape)}
    for name in buffers:
        m = module.get_submodule(name.rpartition(".")[0])
        if name not in result and keeps_statistics(m):
            result[name] = m
    return result


def _all_ranks_run(params: Any) -> bool:
    """Whether every process of the world holds a part of these parameters, so that all generate together."""
    shards = flat_shards(params)
    return bool(shards) and dist.is_initialized() and len(shards[0].layout.grid.ranks) == dist.get_world_size()


def _some(names: Sequence[str]) -> str:
    return listed(map(repr, names), 4) or "nothing"
