"""The checker: what a function does is recorded, typed by what varies along which axis, and judged.

`recording` takes down each op, and `ops` what it did to which `values`, called from which of the `callsites`;
`varying` says along which axes these vary, `judging` what is wrong with that, and `fixes` what to write.
Imports compat and mesh.
"""
