"""The simulated accelerator, as tests know it."""

from shardfn.simulated.device import Device, Wait, simulated

__all__ = ["Device", "Wait", "simulated"]
