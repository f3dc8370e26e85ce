"""Curvature of losses of sharded parameters: operators, their eigenvalues, traces and inverses, single examples.

Imports `stages`, `transforms`, `optim`, `checkpoint`, `shards`, `collectives` and `compat`.
"""

from shardfn.curvature.influence import GradientStore, influence, store_gradients
from shardfn.curvature.kronecker import Kronecker, SecondMoments, ekfac, second_moments
from shardfn.curvature.labels import SampledLabels
from shardfn.curvature.operators import Operator, empirical_fisher, fisher, ggn, hvp
from shardfn.curvature.per_example import PerExample, dp_grads, noise_scale, per_example
from shardfn.curvature.privacy import epsilon, noise_multiplier_for
from shardfn.curvature.sharpness import CriticalRate, critical_sharpness, preconditioned, sharpness
from shardfn.curvature.solving import Solution, solve
from shardfn.curvature.spectra import Eigenpairs, Estimate, Spectrum, diag, spectrum, top_eig, trace
from shardfn.curvature.unrolling import implicit, unroll

__all__ = [
    "CriticalRate",
    "Eigenpairs",
    "Estimate",
    "GradientStore",
    "Kronecker",
    "Operator",
    "PerExample",
    "SampledLabels",
    "SecondMoments",
    "Solution",
    "Spectrum",
    "critical_sharpness",
    "diag",
    "dp_grads",
    "ekfac",
    "empirical_fisher",
    "epsilon",
    "fisher",
    "ggn",
    "hvp",
    "implicit",
    "influence",
    "noise_multiplier_for",
    "noise_scale",
    "per_example",
    "preconditioned",
    "second_moments",
    "sharpness",
    "solve",
    "spectrum",
    "store_gradients",
    "top_eig",
    "trace",
    "unroll",
]
