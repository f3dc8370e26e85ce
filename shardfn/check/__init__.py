"""The checker: what a function does is recorded, typed by what varies along which axis, and judged.

`recording` takes down each op, `seen` what it did to which `values`; `varying` says along which axes these vary, and
`judging` what is wrong with that.
Imports compat and mesh.
"""
