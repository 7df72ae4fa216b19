"""Samples of an image, also at places that are no numbers, or infinite, are eager's."""

from __future__ import annotations

import itertools

import torch

from lowering.decompositions.sampling import grid_sampler_2d

NAMES = ("bilinear", "nearest"), ("zeros", "border", "reflection")


def test_places_that_are_no_numbers() -> None:
    places = torch.tensor([torch.nan, torch.inf, -torch.inf, -1.0, 0.3, 2.0, -1e6])
    grid = torch.cartesian_prod(places, places).view(1, len(places), -1, 2)
    image = torch.arange(24.0).view(1, 1, 4, 6)
    large = torch.tensor([[[[3e38, 0], [0, 3e38], [-1e38, 1e38]]]])  # in places beyond f32, or not
    for given in ((image, large, 0, 0, False), (image[:, :, :1], large, 0, 0, True)):
        expected = torch.ops.aten.grid_sampler_2d.default(*given)
        torch.testing.assert_close(grid_sampler_2d(*given), expected, equal_nan=True)
    for mode, padding, aligns in itertools.product(range(2), range(3), (False, True)):
        arguments = image, grid, mode, padding, aligns
        torch.testing.assert_close(
            grid_sampler_2d(*arguments),
            torch.ops.aten.grid_sampler_2d.default(*arguments),
            equal_nan=True,
            msg=lambda m, c=f"{NAMES[0][mode]}, {NAMES[1][padding]}, {aligns}": f"{c}: {m}",
        )
