"""Kernels that are used on a device only after they were compared with a reference there."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from shardfn.compat import dispatch, functorch

_found: dict[tuple[str, torch.device], bool] = {}


def trusted(kernel: str, device: torch.device, check: Callable[[], str]) -> bool:
    """Whether a kernel passed its check on a device; the check runs the first time. If it fails, a warning says so.

    Args:
        kernel: a description of the kernel, with all that it is compiled for.
        device: the device on which it runs.
        check: returns how its results differ from those of the reference; empty if they do not.
    """
    key = kernel, device
    if key not in _found:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False  # the check makes the host wait, which a CUDA graph cannot hold
        problem = _run_check(check)
        _found[key] = not problem
        if problem:
            warnings.warn(
                f"{kernel}, on {device}, is not used: it failed its check: {problem}. Slower kernels compute the same",
                RuntimeWarning,
                stacklevel=2,
            )
    return _found[key]


def _run_check(check: Callable[[], str]) -> str:
    try:
        with functorch.outside_transforms(), dispatch.outside_modes(), torch.inference_mode(False), torch.no_grad():
            return check()
    except torch.OutOfMemoryError:
        raise  # which says nothing of the kernel
    except Exception as error:  # whatever a kernel raises where it cannot be compiled or run
        return f"{type(error).__name__}: {error}"
