"""The checker: records what a function does, infers which values vary along which mesh axis, and reports errors.

`recording` records each op; `ops`, `values` and `callsites` work out what it did to which values, and from which line.
`varying` infers the axes along which values vary, `judging` finds what is wrong with that, and `fixes` says what to
write. Imports compat and mesh.
"""

from shardfn.check.findings import Finding, VaryingError, VaryingWarning
from shardfn.check.varying import typeof

__all__ = ["Finding", "VaryingError", "VaryingWarning", "typeof"]
