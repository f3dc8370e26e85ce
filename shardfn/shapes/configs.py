"""Plans of steps that train a model of a Hugging Face configuration, from its file or folder."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from shardfn import interop
from shardfn.collectives.functional import psum
from shardfn.mesh.make import make_mesh
from shardfn.plans.plan import Plan
from shardfn.plans.planning import plan, planning
from shardfn.quoting import short
from shardfn.shapes.settings import Setting, dtype_of, optimizer_of, stepping


def config_at(path: Path) -> Path:
    """Returns the file of a configuration: the path itself, or `config.json` in that folder.

    Raises:
        OSError: there is none.
        ValueError: it is none of a model.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        told = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(told, dict) or "model_type" not in told:
        raise ValueError(f"{file} has no model_type: it is no configuration of a model, as Hugging Face writes them")
    return file


def planned_config(path: Path, setting: Setting, rank: int = 0) -> Plan:
    """Plans a step that trains the causal language model of a configuration, as the module of transformers computes it.

    Raises:
        OSError, ValueError: there is no such configuration; or as `planned`.
        ModuleNotFoundError: transformers is missing.
    """
    if find_spec("transformers") is None:
        raise ModuleNotFoundError(
            "plans of a configuration need transformers: pip install transformers", name="transformers"
        )
    file = config_at(path)
    import transformers

    config = transformers.AutoConfig.from_pretrained(file.parent if file.name == "config.json" else file)
    length = setting.sequence or int(getattr(config, "max_position_embeddings", 2048))
    placement, optimizer = setting.placement(), optimizer_of(setting.optimizer)
    if setting.mesh.get("tensor", 1) > 1:
        raise ValueError(f"{file}: modules are planned without the axis 'tensor': leave it out of the mesh")
    if setting.batch < 1 or setting.micro < 1 or setting.batch % setting.micro:
        raise ValueError(f"a batch of {setting.batch} cannot be cut into {setting.micro} equal micro-batches")
    config.use_cache = False
    with interop.meta():
        module: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype_of(setting.kept))
    remat: Any = {"off": False, "on": True, "offload": "offload"}[setting.remat]
    dtype = dtype_of(setting.dtype)
    with planning(setting.ranks, rank, per_node=setting.per_node) as device:
        axes: dict[str, Any] = dict(setting.mesh)
        mesh = make_mesh(**axes)
        model = interop.functional(module, remat=remat, gather_dtype=dtype, input_dtype=dtype)
        params = model.shard(mesh, placement)
        state = optimizer.init(params)
        count = setting.batch * length * setting.ranks

        def loss(params: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            out = model(params, input_ids=tokens, labels=targets, num_items_in_batch=count, use_cache=False)
            total: torch.Tensor = psum(out.loss, setting.data)
            return total

        step = stepping(loss, optimizer, mesh, setting)
        tokens = torch.zeros(setting.batch, length, dtype=torch.int64, device=device.name)
        name = short(getattr(config, "_name_or_path", "") or str(path), 60)
        return replace(plan(step, params, state, tokens, tokens.clone()), name=name)
