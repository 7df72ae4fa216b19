"""Write products of rows by panels, and what is computed of them, as loops over blocks of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lowering.stages.flow.rows.graph import (
    Access,
    Compute,
    Constant,
    Load,
    Multiply,
    RowGraph,
    Source,
    Value,
)
from lowering.stages.flow.rows.signature import arguments_of
from lowering.stages.flow.rows.tensors import Part, Tensors
from lowering.stages.flow.rows.text import Text
from lowering.stages.ir.factors import TO_FLOAT
from lowering.stages.ir.types import floats, tensor
from lowering.stages.ir.work_items import ANY_ROWS, work_item

_MOST_ROWS = 2 * ANY_ROWS  # of a work item
_FEW = (4, 1)  # rows of a block, where there are fewer than the registers hold the sums of
_SIZES = """
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  %most = arith.constant {most} : index
  %height = arith.constant {height} : index
  %many = arith.ceildivui %rows, %most : index
  %items = arith.maxui %many, %one : index
  %even = arith.ceildivui %rows, %items : index
  %some_blocks = arith.ceildivui %even, %height : index
  %blocks = arith.maxui %some_blocks, %one : index
  %some = arith.muli %blocks, %height : index
"""
_COUNTS = """
func.func @counts(%rows: index) -> (index, index, index) {{
{sizes}
  %x = arith.ceildivui %rows, %some : index
  %y = arith.constant {panel_items} : index
  return %x, %y, %one : index, index, index
}}
"""
_FUNCTION = """
func.func @product({arguments}) {{
{sizes}
  %depth = arith.constant {depth} : index
  %width = arith.constant {width} : index
  %panels = arith.constant {panels} : index
  %share = arith.constant {share} : index
  %row_item = flow.dispatch.workgroup.id[0] : index
  %begin = arith.muli %row_item, %some : index
  %below = arith.addi %begin, %some : index
  %end = arith.minui %below, %rows : index
  %count = arith.subi %end, %begin : index
  %panel_item = flow.dispatch.workgroup.id[1] : index
  %left = arith.muli %panel_item, %share : index
  %beside = arith.addi %left, %share : index
  %right = arith.minui %beside, %panels : index
{before}
  scf.for %panel = %left to %right step %one {{
    %column = arith.muli %panel, %width : index
{body}
  }}
  return
}}
"""


def can_multiply(graph: RowGraph, outputs: Sequence[Value]) -> bool:
    """Say whether a graph is a product of unknown rows, and what is computed number by number."""
    is_plain = len(graph.products()) == 1 and not graph.reductions()
    is_any = graph.rows is None and graph.columns is not None
    return is_plain and is_any and all(value.access is Access.LINE for value in outputs)


def count_blocks(graph: RowGraph) -> str:
    """Write a function that takes the number of rows, and says how many work items to run."""
    product = _Product.of(graph)
    return _COUNTS.format(sizes=product.sizes(), panel_items=-(-product.panels // product.share))


def write_product(graph: RowGraph, sources: Sequence[Source], outputs: Sequence[Value]) -> str:
    """Write a function that loads the sources and stores the outputs.

    It multiplies a block of rows by one panel at a time, and computes what follows of the sums
    while they are in registers. The last block of rows begins such that it is whole: some rows are
    computed twice. Of fewer rows than that, blocks have four, or one.

    Args:
        graph: one product, of unknown rows, and what is computed number by number.
        sources: the arguments, after the number of rows.
        outputs: what the arguments after these get.
    """
    product = _Product.of(graph)
    text = Text(graph, product.width)
    return _Writer(product, text, Tensors(text, sources, outputs)).program()


@dataclass(frozen=True)
class _Product:
    """How a product is shared out.

    Attributes:
        place: its node.
        node: the same.
        panels, depth, width: how many panels there are, of how many rows and columns.
    """

    place: int
    node: Multiply
    panels: int
    depth: int
    width: int

    @classmethod
    def of(cls, graph: RowGraph) -> _Product:
        """Find the one of a graph."""
        ((place, node),) = graph.products()
        panels = graph.nodes[node.panels]
        assert isinstance(panels, Load)
        return cls(place, node, *panels.source.sizes)

    @property
    def share(self) -> int:
        """How many panels there are of a work item."""
        return work_item(ANY_ROWS, self.panels, 1, 1)[1]

    def sizes(self) -> str:
        """Write how many rows there are of a work item: some."""
        return _SIZES.format(most=_MOST_ROWS, height=self.node.height)


@dataclass
class _Writer:
    """What is written of a function, and what its values are called.

    Attributes:
        product: what is multiplied.
        text: the ops.
        tensors: the arguments.
        common: node -> a vector of it, that all rows have.
    """

    product: _Product
    text: Text
    tensors: Tensors
    common: dict[int, str] = field(default_factory=dict)

    def program(self) -> str:
        text, product = self.text, self.product
        self.tensors.tie()
        self._take(Access.ONE, Access.NUMBER)
        for place, node in enumerate(text.graph.nodes):
            if isinstance(node, Constant):
                self.common[place] = text.vector_of(node.number, node.dtype)
        before, text.lines = text.lines, []
        self._take(Access.COLUMN)
        panel = self.load(
            product.node.panels,
            Part(
                ("%panel", 0, 0),
                (1, product.depth, product.width),
                (product.depth, product.width),
            ),
        )
        highest = product.node.height
        self._write_blocks(panel, [highest, *(few for few in _FEW if few < highest)])
        return _FUNCTION.format(
            arguments=arguments_of(text.graph, self.tensors.sources, self.tensors.outputs),
            sizes=product.sizes(),
            depth=product.depth,
            width=product.width,
            panels=product.panels,
            share=product.share,
            before="\n".join(before),
            body="\n".join(text.lines),
        )

    def load(self, place: int, part: Part) -> str:
        """Load a part of the tensor that a node is a number of."""
        node = self.text.graph.nodes[place]
        assert isinstance(node, Load)
        return self.tensors.load(node.argument, part)

    def _take(self, *accesses: Access) -> None:
        """Write what all rows have: of a panel, or of all."""
        text, width = self.text, self.product.width
        for place, node in enumerate(text.graph.nodes):
            access = node.source.access if isinstance(node, Load) else None
            if access not in accesses:
                continue
            if access is Access.COLUMN:
                line = self.load(place, Part(("%column",), (width,), (width,)))
                vector = text.read(line, "%zero", tensor([width], node.dtype), node.dtype)
            elif access is Access.ONE:
                one = tensor([], node.dtype)
                number = text.say(f"tensor.extract {self.load(place, Part())}[] : {one}")
                vector = text.spread(number, node.dtype)
            else:
                assert isinstance(node, Load)
                vector = text.spread(self.tensors.number(node.argument), node.dtype)
            self.common[place] = vector

    def _write_blocks(self, panel: str, heights: Sequence[int]) -> None:
        """Write the loops over blocks of rows, of the first height that there are rows for."""
        text, (height, *lower) = self.text, heights
        size = text.say(f"arith.constant {height} : index")
        if lower:
            fits = text.say(f"arith.cmpi uge, %rows, {size} : index")
            text.lines.append(f"scf.if {fits} {{")
        last, row = text.say(f"arith.subi %rows, {size} : index"), text.new("row")
        text.lines.append(f"scf.for {row} = %zero to %count step {size} {{")
        place = text.say(f"arith.addi {row}, %begin : index")
        _Block(self, panel, text.say(f"arith.minui {place}, {last} : index"), height).write()
        text.lines.append("}")
        if lower:
            text.lines.append("} else {")
            self._write_blocks(panel, lower)
            text.lines.append("}")


@dataclass
class _Block:
    """Some rows of one panel.

    Attributes:
        writer: what all of them have.
        panel: of the other factor.
        begin: the first row.
        height: how many there are.
    """

    writer: _Writer
    panel: str
    begin: str
    height: int
    _rows: list[str] = field(default_factory=list)  # 0, 1, ... as values
    _sums: list[str] = field(default_factory=list)  # of each row
    _tiles: dict[int, str] = field(default_factory=dict)  # node -> the block of its tensor

    def write(self) -> None:
        """Write the sums, what is computed of them, and store it."""
        text, outputs = self.writer.text, self.writer.tensors.outputs
        self._rows = [text.say(f"arith.constant {r} : index") for r in range(self.height)]
        self._sums = self._add_up()
        values = [dict[int, str]() for _ in self._rows]
        for i, output in enumerate(outputs):
            dtype = text.graph.nodes[output.node].dtype
            kind = tensor(self._lines.shape, dtype)
            tile = text.say(f"tensor.empty() : {kind}")
            for r, row in enumerate(self._rows):
                vector = self._value(output.node, r, values[r])
                tile = text.write(vector, tile, f"{row}, %zero", kind, dtype)
            self.writer.tensors.store(tile, i, self._lines)

    @property
    def _lines(self) -> Part:
        """The block of a tensor that has rows and columns."""
        shape = self.height, self.writer.product.width
        return Part((self.begin, "%column"), shape, shape)

    def _add_up(self) -> list[str]:
        """Write the products of the rows by the panel, as loops that later stages know."""
        text, product, height = self.writer.text, self.writer.product, self.height
        shape = height, product.depth
        factor = self.writer.load(product.node.factor, Part((self.begin, 0), shape, shape))
        kind, dtype = text.vector("f32"), text.graph.nodes[product.node.panels].dtype
        panel = tensor([product.depth, product.width], dtype)
        all_kind = f"vector<{height}x{product.width}xf32>"
        zeros = text.say(f"arith.constant dense<0.0> : {all_kind}")
        sums, k, total = text.new("sums"), text.new("k"), text.new("sum")
        text.lines.append(
            f"{sums} = scf.for {k} = %zero to %depth step %one "
            f"iter_args({total} = {zeros}) -> ({all_kind}) {{"
        )
        line, more = text.read(self.panel, f"{k}, %zero", panel, dtype), total
        if dtype in TO_FLOAT:
            line = text.say(f"{TO_FLOAT[dtype]} {line} : {text.vector(dtype)} to {kind}")
        for r, row in enumerate(self._rows):
            number = text.say(f"tensor.extract {factor}[{row}, {k}] : {floats(*shape)}")
            same = text.spread(number, "f32")
            before = text.say(f"vector.extract {total}[{r}] : {kind} from {all_kind}")
            after = text.say(f"vector.fma {same}, {line}, {before} : {kind}")
            more = text.say(f"vector.insert {after}, {more}[{r}] : {kind} into {all_kind}")
        text.lines.append(f"scf.yield {more} : {all_kind}\n}}")
        return [
            text.say(f"vector.extract {sums}[{r}] : {kind} from {all_kind}") for r in range(height)
        ]

    def _value(self, place: int, r: int, values: dict[int, str]) -> str:
        """Write what a node is, of a row, if it is not there."""
        text, node = self.writer.text, self.writer.text.graph.nodes[place]
        if place == self.writer.product.place:
            return self._sums[r]
        if place in self.writer.common:
            return self.writer.common[place]
        if place not in values:
            if isinstance(node, Compute):
                operands = [self._value(i, r, values) for i in node.operands]
                values[place] = text.compute(node, operands, of_vectors=True)
            else:
                assert isinstance(node, Load)
                values[place] = self._loaded(place, node, self._rows[r])
        return values[place]

    def _loaded(self, place: int, node: Load, row: str) -> str:
        """Write what a tensor holds of a row."""
        text = self.writer.text
        is_line = node.source.access is Access.LINE
        part = self._lines if is_line else Part((self.begin,), (self.height,), (self.height,))
        if place not in self._tiles:
            self._tiles[place] = self.writer.load(place, part)
        kind = tensor(part.shape, node.dtype)
        if is_line:
            return text.read(self._tiles[place], f"{row}, %zero", kind, node.dtype)
        number = text.say(f"tensor.extract {self._tiles[place]}[{row}] : {kind}")
        return text.spread(number, node.dtype)
