"""Compares copies of replicated values, of which each rank writes a share: shares of other copies make a mixture."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from shardfn.checkpoint.contents import Contents
from shardfn.checkpoint.team import RankGroup
from shardfn.quoting import listed
from shardfn.shards.replicated import checksum

Place = tuple[str, int]
"""The ranks that hold equal copies: the axes over which a value is sharded, and their index along these."""

Digests = dict[str, tuple[Place, int]]


def digests(flat_tree: Contents, plain: bool = False) -> Digests:
    """A digest of this rank's copy of each replicated value, also of whole tensors if `plain`; reads them once."""
    result: Digests = {}
    for name, copy in flat_tree.copies.items():
        if copy.parts:
            digest = checksum(copy.parts[0]) if len(copy.parts) == 1 else hash(tuple(map(checksum, copy.parts)))
            result[name] = copy.place, digest
        copy.parts.clear()
    return result | ({name: (("", 0), checksum(x)) for name, x in flat_tree.plain.items()} if plain else {})


def summary(local_digests: Digests) -> dict[Place, int]:
    """One number for each place: a few bytes to exchange, whatever the number of values."""
    by_place: dict[Place, int] = {}
    for name, (place, digest) in sorted(local_digests.items()):
        by_place[place] = zlib.crc32(f"{name} {digest}".encode(), by_place.get(place, 0))
    return by_place


def differing(local_digests: Digests, summaries: Iterable[dict[Place, int]], group: RankGroup) -> list[str]:
    """Names of values of which ranks hold different copies; the same on all ranks, which call it together."""
    reference: dict[Place, int] = {}
    if all(reference.setdefault(place, number) == number for entry in summaries for place, number in entry.items()):
        return []
    first: dict[tuple[str, Place], int] = {}
    every = [(name, *entry) for rank in group.gathered(local_digests) for name, entry in rank.items()]
    return list(dict.fromkeys(n for n, place, digest in every if first.setdefault((n, place), digest) != digest))


def advice(names: list[str], way_out: str) -> str:
    """The message about values that differ."""
    has = "have" if len(names) > 1 else "has"
    return (
        f"{listed(names)} {has} other numbers on some ranks than on others. Make copies equal, as by sf.pmean over the "
        f"axis along which they differ, or {way_out}"
    )
