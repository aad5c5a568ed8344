"""Vector instructions for the CPU kernel: its inner loops, written as LLVM's own vectors.

A compiler that looks for vectors in plain loops reads, and converts, K and V once a query head. Here
a step is 4 query heads by 4 tokens: each vector of K or V is read and converted once for the 4 heads,
each vector of a query once for the 4 tokens, and 16 sums stay in registers.

Arrays are flat and contiguous; offsets are int64, in elements; nothing is checked. A cache's elements
are float32, or 16 bits: int16 holds the bits of an fp16 number, uint16 those of a bf16 number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import factorial, log
from typing import Any

from llvmlite import ir

from kvtool.jit import intrinsic, types

STEP = 4
"""Query heads, and tokens, of one step."""
_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
# 2**f = sum of (f ln 2)**k / k!: for |f| <= 1/2 what is left out is below 6e-9.
_EXP2 = [log(2) ** k / factorial(k) for k in range(8)]
_SMALLEST = -126.0  # 2**-126: below it, fp32 has no numbers of full precision


@intrinsic
def prefetch(_typing: Any, array: Any, at: Any) -> Any:
    """Ask memory for the line that array[at] stands in, and go on."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        code = _Code(context, builder, signature, values)
        pointer = builder.bitcast(code.pointer(0, values[1]), ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _INT, _INT, _INT])
        ask = builder.module.declare_intrinsic("llvm.prefetch.p0i8", (), kind)
        builder.call(ask, [pointer, _INT(0), _INT(2), _INT(1)])  # to read; no nearer than L2; data
        return context.get_dummy_value()

    return types.none(array, types.int64), emit


@intrinsic
def score_step(
    _typing: Any, query: Any, q_at: Any, size: Any, keys: Any, rows: Any, row_at: Any, shift: Any,
    scores: Any, s_at: Any, width: Any,
) -> Any:  # fmt: skip
    """For 4 heads h and 4 tokens t, scores[s_at + h width + t] =
    query[q_at + h size :][:size] · keys[rows[row_at + t] + shift :][:size].
    """

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        code = _Code(context, builder, signature, values)
        _, q_at, size, _, _, row_at, shift, _, s_at, width = values
        heads = [code.at(q_at, size, h) for h in range(STEP)]
        tokens = code.lanes // STEP  # at a time: as many sums as a vector has lanes
        for first in range(0, STEP, tokens):
            starts = code.starts(4, row_at, shift, range(first, first + tokens))

            def add(at: Any, sums: Any, starts: Any = starts) -> Any:
                k = [code.load(3, builder.add(start, at)) for start in starts]
                q = [code.load(0, builder.add(head, at)) for head in heads]
                pairs = [(one, other) for one in q for other in k]
                return [code.fma(*pair, old) for pair, old in zip(pairs, sums, strict=True)]

            sums = code.loop(size, [code.splat(_FLOAT(0.0))] * code.lanes, add)
            folded = code.fold(sums)
            for h in range(STEP):
                lanes = code.lanes_of(folded, folded, range(h * tokens, (h + 1) * tokens))
                code.store(7, code.at(s_at, width, h, first), lanes)
        return context.get_dummy_value()

    numbers = (types.int64,) * 3
    return types.none(query, *numbers[:2], keys, rows, *numbers[:2], scores, *numbers[:2]), emit


@intrinsic
def mix_step(
    _typing: Any, sums: Any, a_at: Any, size: Any, values: Any, rows: Any, row_at: Any, shift: Any,
    weights: Any, w_at: Any, width: Any,
) -> Any:  # fmt: skip
    """For 4 heads h, sums[a_at + h size :][:size] += the sum over 4 tokens t of
    weights[w_at + h width + t] values[rows[row_at + t] + shift :][:size].
    """

    def emit(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        code = _Code(context, builder, signature, given)
        _, a_at, size, _, _, row_at, shift, _, w_at, width = given
        heads = [code.at(a_at, size, h) for h in range(STEP)]
        tokens = code.lanes // STEP
        for first in range(0, STEP, tokens):
            group = range(first, first + tokens)
            starts = code.starts(4, row_at, shift, group)
            shares = [
                [
                    code.splat(builder.load(code.pointer(7, code.at(w_at, width, h, t))))
                    for t in group
                ]
                for h in range(STEP)
            ]

            def add(at: Any, _: Any, starts: Any = starts, shares: Any = shares) -> Any:
                v = [code.load(3, builder.add(start, at)) for start in starts]
                for head, share in zip(heads, shares, strict=True):
                    place = builder.add(head, at)
                    total = code.load(0, place)
                    for weight, vector in zip(share, v, strict=True):
                        total = code.fma(weight, vector, total)
                    code.store(0, place, total)
                return []

            code.loop(size, [], add)
        return context.get_dummy_value()

    numbers = (types.int64,) * 3
    return types.none(sums, *numbers[:2], values, rows, *numbers[:2], weights, *numbers[:2]), emit


@intrinsic
def largest(_typing: Any, array: Any, at: Any, size: Any) -> Any:
    """The largest of array[at : at + size], as fp32; size is a multiple of 16."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        code = _Code(context, builder, signature, values)

        def compare(at: Any, found: Any) -> Any:
            return [code.larger(code.load(0, builder.add(values[1], at)), found[0])]

        (found,) = code.loop(values[2], [code.splat(_FLOAT(float("-inf")))], compare)
        return code.reduce(found, code.larger)

    return types.float32(array, types.int64, types.int64), emit


@intrinsic
def exponentials(_typing: Any, array: Any, at: Any, size: Any, less: Any) -> Any:
    """Put 2**(x - less) in the place of each x of array[at : at + size]; their sum."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        code = _Code(context, builder, signature, values)
        less = code.splat(values[3])

        def replace(at: Any, total: Any) -> Any:
            place = builder.add(values[1], at)
            power = code.exp2(builder.fsub(code.load(0, place), less))
            code.store(0, place, power)
            return [builder.fadd(total[0], power)]

        (total,) = code.loop(values[2], [code.splat(_FLOAT(0.0))], replace)
        return code.reduce(total, builder.fadd)

    return types.float32(array, types.int64, types.int64, types.float32), emit


@intrinsic
def scale_row(_typing: Any, array: Any, at: Any, size: Any, factor: Any) -> Any:
    """array[at : at + size] *= factor."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        code = _Code(context, builder, signature, values)
        factor = code.splat(values[3])

        def multiply(at: Any, _: Any) -> Any:
            place = builder.add(values[1], at)
            code.store(0, place, builder.fmul(code.load(0, place), factor))
            return []

        code.loop(values[2], [], multiply)
        return context.get_dummy_value()

    return types.none(array, types.int64, types.int64, types.float32), emit


class _Code:
    """The instructions of one call: LLVM's builder, and the call's arguments by their place."""

    def __init__(self, context: Any, builder: Any, signature: Any, values: Any) -> None:
        self.builder, self._kinds, self._values = builder, signature.args, values
        self._context = context
        self.lanes = 16 if "+avx512f" in context.codegen().magic_tuple()[2] else 8
        self._vector = ir.VectorType(_FLOAT, self.lanes)

    def pointer(self, argument: int, at: Any) -> Any:
        """Where element `at` of an array stands."""
        kind, value = self._kinds[argument], self._values[argument]
        data = self._context.make_array(kind)(self._context, self.builder, value).data
        return self.builder.gep(data, [at])

    def at(self, start: Any, stride: Any, times: int, more: int = 0) -> Any:
        """start + times stride + more"""
        skipped = self.builder.mul(stride, _LONG(times))
        return self.builder.add(self.builder.add(start, skipped), _LONG(more))

    def starts(self, rows: int, row_at: Any, shift: Any, tokens: Sequence[int]) -> list[Any]:
        """Where the rows of these tokens begin."""
        places = (self.pointer(rows, self.at(row_at, _LONG(1), t)) for t in tokens)
        return [self.builder.add(self.builder.load(place), shift) for place in places]

    def load(self, argument: int, at: Any) -> Any:
        """A vector from an array, as fp32."""
        builder, kind = self.builder, self._kinds[argument].dtype
        element = {types.float32: _FLOAT, types.int16: ir.HalfType(), types.uint16: ir.IntType(16)}
        raw = ir.VectorType(element[kind], self.lanes)
        place = builder.bitcast(self.pointer(argument, at), raw.as_pointer())
        vector = builder.load(place, align=kind.bitwidth // 8)
        if kind == types.int16:
            return builder.fpext(vector, self._vector)
        if kind == types.uint16:  # bf16 is the upper half of fp32
            wide = ir.VectorType(_INT, self.lanes)
            bits = builder.shl(builder.zext(vector, wide), ir.Constant(wide, [16] * self.lanes))
            return builder.bitcast(bits, self._vector)
        return vector

    def store(self, argument: int, at: Any, vector: Any) -> None:
        """A vector into an array of fp32."""
        place = self.builder.bitcast(self.pointer(argument, at), vector.type.as_pointer())
        self.builder.store(vector, place, align=4)

    def loop(self, size: Any, first: list[Any], body: Callable[[Any, Any], Any]) -> list[Any]:
        """for at in range(0, size, lanes): values = body(at, values); the last values. size > 0"""
        builder = self.builder
        before, again, after = builder.block, *map(builder.append_basic_block, ("loop", "after"))
        builder.branch(again)
        builder.position_at_end(again)
        at, *values = (builder.phi(one.type) for one in (_LONG(0), *first))
        results = body(at, values)
        following = builder.add(at, _LONG(self.lanes))
        for phi, old, new in zip(
            (at, *values), (_LONG(0), *first), (following, *results), strict=True
        ):
            phi.add_incoming(old, before)
            phi.add_incoming(new, again)
        builder.cbranch(builder.icmp_signed("<", following, size), again, after)
        builder.position_at_end(after)
        return list(results)

    def splat(self, number: Any) -> Any:
        """A vector of one number."""
        empty = ir.Constant(self._vector, ir.Undefined)
        alone = self.builder.insert_element(empty, number, _INT(0))
        return self.lanes_of(alone, empty, [0] * self.lanes)

    def lanes_of(self, one: Any, other: Any, lanes: Sequence[int]) -> Any:
        """A vector of these lanes; those of the other vector are counted on from the first's."""
        mask = ir.Constant(ir.VectorType(_INT, len(lanes)), list(lanes))
        return self.builder.shuffle_vector(one, other, mask)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        """a b + c, rounded once where the machine can."""
        return self._call("llvm.fmuladd", a, b, c)

    def larger(self, one: Any, other: Any) -> Any:
        """The larger of each two numbers."""
        return self.builder.select(self.builder.fcmp_ordered(">", one, other), one, other)

    def fold(self, vectors: list[Any]) -> Any:
        """As many vectors as there are lanes become one: lane i is the sum over vector i."""
        part = self.lanes
        while len(vectors) > 1:
            half = part // 2
            low = [i for i in range(2 * self.lanes) if i % part < half]
            vectors = [
                self.builder.fadd(
                    self.lanes_of(a, b, low), self.lanes_of(a, b, [i + half for i in low])
                )
                for a, b in zip(vectors[::2], vectors[1::2], strict=True)
            ]
            part = half
        return vectors[0]

    def reduce(self, vector: Any, operation: Callable[[Any, Any], Any]) -> Any:
        """One number from all lanes."""
        half = self.lanes // 2
        while half:
            low, high = range(half), range(half, 2 * half)
            vector = operation(
                self.lanes_of(vector, vector, low), self.lanes_of(vector, vector, high)
            )
            half //= 2
        return self.builder.extract_element(vector, _INT(0))

    def exp2(self, x: Any) -> Any:
        """2**x for x <= 0: 2**n from the bits of an exponent, 2**f, |f| <= 1/2, from a series."""
        builder = self.builder

        def splat(number: float) -> Any:
            return self.splat(_FLOAT(number))

        tiny = builder.fcmp_ordered("<", x, splat(_SMALLEST))
        x = builder.select(tiny, splat(_SMALLEST), x)
        n = self._call("llvm.floor", builder.fadd(x, splat(0.5)))
        f = builder.fsub(x, n)
        power = splat(_EXP2[-1])
        for coefficient in reversed(_EXP2[:-1]):
            power = self.fma(power, f, splat(coefficient))
        wide = ir.VectorType(_INT, self.lanes)
        bias, shift = (ir.Constant(wide, [number] * self.lanes) for number in (127, 23))
        exponent = builder.shl(builder.add(builder.fptosi(n, wide), bias), shift)
        power = builder.fmul(power, builder.bitcast(exponent, self._vector))
        return builder.select(tiny, splat(0.0), power)

    def _call(self, name: str, *vectors: Any) -> Any:
        kind = ir.FunctionType(self._vector, [self._vector] * len(vectors))
        function = self.builder.module.declare_intrinsic(f"{name}.v{self.lanes}f32", (), kind)
        return self.builder.call(function, vectors)
