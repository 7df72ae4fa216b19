"""Sum the gradient of a weight in groups over places, row by row of the images, in registers."""

from __future__ import annotations

from typing import Any

from lowering.stages.ir.device_programs import (
    EXECUTABLE,
    LOAD,
    STORE,
    functions_of,
    is_loaded,
    is_whole,
    set_workgroups,
    tell_flops,
)
from lowering.stages.ir.structured import inputs_of
from lowering.stages.ir.symbols import inside, ops_of
from lowering.stages.ir.templates import put, tiles_of_product
from lowering.stages.ir.types import floats
from lowering.stages.linalg.mark_weight_gradients import MARK

_MOST_SUMS = 1 << 10  # of a work item; IREE begins with zeros in a vector of as many
# Of a work item: a place of the window, for some channels and all features of a group.
_LOOPS = """
func.func @loops(%xs: {xs}, %gradients: {gradients}, %all: {all}) {{
  %zero = arith.constant 0.0 : f32
  %first = arith.constant 0 : index
  %step = arith.constant 1 : index
  %count = arith.constant {count} : index
  %height = arith.constant {height} : index
  %place = flow.dispatch.workgroup.id[0] : index
  %group = flow.dispatch.workgroup.id[1] : index
  %i = affine.apply affine_map<(d0) -> (d0 floordiv {wide})>(%place)
  %j = affine.apply affine_map<(d0) -> (d0 mod {wide})>(%place)
  %x = affine.apply affine_map<(d0) -> (d0 * {apart[1]})>(%j)
  %block = flow.dispatch.workgroup.id[2] : index
  %begin = affine.apply affine_map<(d0) -> (d0 * {some})>(%block)
  %channel = affine.apply affine_map<(d0, d1) -> (d0 * {channels} + d1)>(%group, %begin)
  %feature = affine.apply affine_map<(d0) -> (d0 * {features})>(%group)
  %empty = tensor.empty() : {tile}
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : {tile}) -> {tile}
  %sums = scf.for %n = %first to %count step %step iter_args(%before = %zeros) -> ({tile}) {{
    %more = scf.for %h = %first to %height step %step iter_args(%sum = %before) -> ({tile}) {{
      %y = affine.apply affine_map<(d0, d1) -> (d0 * {stride[0]} + d1 * {apart[0]})>(%h, %i)
      %seen = iree_tensor_ext.dispatch.tensor.load %xs, offsets = [{n}%y, %x, %channel],
          sizes = [{one}1, {width}, {some}], strides = [{one}1, {stride[1]}, 1]
          : {xs} -> {seen}
      %given = iree_tensor_ext.dispatch.tensor.load %gradients, offsets = [{n}%h, 0, %feature],
          sizes = [{one}1, {width}, {features}], strides = [{one}1, 1, 1]
          : {gradients} -> {given}
      %next = linalg.matmul indexing_maps = [affine_map<(m, n, k) -> (k, m)>,
                                             affine_map<(m, n, k) -> (k, n)>,
                                             affine_map<(m, n, k) -> (m, n)>]
          {{compilation_info = {tiles}}}
          ins(%seen, %given : {seen}, {given}) outs(%sum : {tile}) -> {tile}
      scf.yield %next : {tile}
    }}
    scf.yield %more : {tile}
  }}
  iree_tensor_ext.dispatch.tensor.store %sums, %all, offsets = [%i, %j, %group, %begin, 0],
      sizes = [1, 1, 1, {some}, {features}], strides = [1, 1, 1, 1, 1] : {tile} -> {all}
  return
}}
"""


def sum_places(module: Any) -> None:
    """Write marked gradients of weights as products of rows of images, and of the gradient.

    Before: %sums[i, j, g, c, f] = sum over n, h, w of
                %x[n, h + i, w + j, g * C + c] * %d[n, h, w, g * F + f]
    After:  for each place i, j of the window, group g, and some channels c of it:
                %tile = 0
                for n in 0..N, h in 0..H:
                    %tile[c, f] += sum over w of %x[n, h + i, w + j, ...] * %d[n, h, w, ...]
                %sums[i, j, g, c] = %tile

    Args:
        module: one in flow, its dispatches formed
            (see `lowering.stages.linalg.mark_weight_gradients`).
    """
    for executable in inside(module, EXECUTABLE):
        for function in functions_of(executable):
            marked = [op for op in ops_of(function) if MARK in op.attributes]
            for op in marked:  # which goes away, with those around it
                _write(executable, function, op)


def _write(executable: Any, function: Any, op: Any) -> None:
    """Write one, if the program does nothing else."""
    from iree.compiler import ir

    *old, end = ops_of(function)
    *_, store = old
    is_alone = [o.name for o in old if o.name in (LOAD, STORE)] == [LOAD, LOAD, STORE]
    values = inputs_of(op)
    if not (is_alone and all(map(is_loaded, values)) and is_whole(store)):
        return
    if store.operands[0] != op.results[0]:
        return
    with ir.InsertionPoint(end), op.location:
        arguments = [*(value.owner.operands[0] for value in values), store.operands[1]]
        put(_loops(op, arguments), arguments)
    *_, groups, channels, features = sums = op.results[0].type.shape
    (*_, height, width, _), places = values[1].type.shape, sums[0] * sums[1]
    count = _count_of(values[1])
    tell_flops(function, 2 * count * height * width * places * groups * channels * features)
    set_workgroups(executable, [places, groups, channels // _channels_at_a_time(op)])
    for left in reversed(old):
        if left.name != "arith.constant":
            left.erase()


def _count_of(gradient: Any) -> int:
    """Return how many images there are; one is no dimension."""
    count, *others = gradient.type.shape
    return count if len(others) == 3 else 1


def _channels_at_a_time(op: Any) -> int:
    """Return how many channels of a group a work item sums: whole blocks that registers hold."""
    rows, *_ = (int(n) for n in op.attributes[MARK])
    *_, channels, features = op.results[0].type.shape
    blocks = [n for n in range(rows, channels + 1, rows) if channels % n == 0]
    return max((n for n in blocks if n * features <= _MOST_SUMS), default=rows)


def _loops(op: Any, arguments: list[Any]) -> str:
    rows, columns, *numbers = (int(n) for n in op.attributes[MARK])
    _, wide, _, channels, features = op.results[0].type.shape
    gradient, some = inputs_of(op)[1], _channels_at_a_time(op)
    *batch, height, width, _ = gradient.type.shape
    xs, gradients, whole = (argument.type for argument in arguments)
    return _LOOPS.format(
        xs=xs,
        gradients=gradients,
        all=whole,
        count=_count_of(gradient),
        height=height,
        width=width,
        wide=wide,
        channels=channels,
        some=some,
        features=features,
        stride=numbers[:2],
        apart=numbers[2:],
        n="%n, " if batch else "",
        one="1, " if batch else "",
        tile=floats(some, features),
        seen=floats(width, some),
        given=floats(width, features),
        tiles=tiles_of_product(rows, columns),
    )
