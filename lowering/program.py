"""What becomes one module: regions, each an entry point, that share parameters by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from lowering.abi import ENTRY
from lowering.region import Region
from lowering.traits import traits_of


@dataclass(frozen=True)
class Program:
    """Regions to compile together.

    Attributes:
        name: for dumps and logs.
        regions: by the name of their entry point. Parameters of one name are one.
        rebind: whether parameters can be bound anew without a load.
    """

    name: str
    regions: Mapping[str, Region]
    rebind: bool = False

    @classmethod
    def of(cls, region: Region) -> Program:
        """Make a program of one region of a plan, whose weights may change from call to call."""
        return cls(region.name, {ENTRY: region}, rebind=True)

    @property
    def graphs(self) -> dict[str, fx.GraphModule]:
        """The graphs by their entry points."""
        return {entry: region.graph_module for entry, region in self.regions.items()}

    @property
    def parameters(self) -> dict[str, tuple[str, ...]]:
        """The names of the parameters of each entry point, in the order of its arguments."""
        return {entry: region.parameter_names for entry, region in self.regions.items()}

    @property
    def given(self) -> dict[str, tuple[int, ...]]:
        """The arguments of each entry point that it may overwrite, where there are some."""
        return {entry: region.given for entry, region in self.regions.items() if region.given}

    @property
    def ops(self) -> frozenset[str]:
        """The names of the ops in it."""
        return frozenset(op for region in self.regions.values() for op, _ in region.ops)

    @property
    def traits(self) -> frozenset[str]:
        """What it contains that decides which compiler settings fit."""
        return traits_of(list(self.graphs.values()))
