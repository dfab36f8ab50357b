"""Triton 3.6's interpreter, patched for NumPy 2.4 and for speed.

A kernel here is some thousand operations on small arrays, of which NumPy takes a tenth of the time and the
interpreter's types the rest; redundant computations are skipped or cached.
"""

from dataclasses import replace
from functools import cache
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton import language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.support import ptx


def adapt_interpreter() -> None:
    """Apply all changes of this module to the interpreter of this process."""
    let_loops_end_where_the_device_says()
    patch_the_language_once_a_launch()
    skip_ignored_overflow_checks()
    keep_numpy_types()
    keep_shapes()
    keep_block_types()
    broadcast_only_other_shapes()
    reduce_whole_blocks()
    convert_float8_as_torch_does()
    run_ptx()


def run_ptx() -> None:
    """Run what kernels write in PTX, as far as `ptx` knows its instructions."""

    def create_inline_asm(
        _builder: Any, code: str, _constraints: str, values: list[Any], types: list[Any], _pure: bool, _pack: int
    ) -> Any:
        (kind,) = types
        found = ptx.run(code, [value.data for value in values])
        handle = interpreter.TensorHandle(found.view(interpreter._get_np_dtype(kind)), kind.scalar)
        return SimpleNamespace(get_result=lambda _place: handle)

    interpreter.InterpreterBuilder.create_inline_asm = create_inline_asm


def convert_float8_as_torch_does() -> None:
    """Round to e4m3 and widen it with torch.

    The interpreter's own code does not carry into the exponent when it rounds up.
    """
    convert = interpreter._convert_float
    known = {
        "fp8e4nv": torch.float8_e4m3fn,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp32": torch.float32,
        "fp64": torch.float64,
    }

    def converted(data: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
        if "fp8e4nv" not in (source.name, target.name):
            return convert(data, source, target, rounding_mode)
        bits = torch.from_numpy(np.ascontiguousarray(data).reshape(-1).view(np.uint8).copy())
        found = bits.view(known[source.name]).to(known[target.name]).view(torch.uint8).numpy()
        return found.view(f"uint{target.primitive_bitwidth}").reshape(data.shape)

    interpreter._convert_float = converted


def let_loops_end_where_the_device_says() -> None:
    """Convert arrays of one element to loop bounds, which NumPy 2.4 no longer does by itself."""
    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_with_index


def patch_the_language_once_a_launch() -> None:
    """Skip patches of `triton.language` that are already applied.

    The interpreter applies its patches before a launch, and again in every call of a device function, which takes many
    times as long as the call. A launch removes them from `tl` at its end, but not from `tl.core`.
    """
    patch = interpreter._patch_lang

    @cache
    def modules_of(function: Any) -> list[Any]:
        return [module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())]

    def patch_what_is_left(function: Any) -> Any:
        members = [tl.tensor.__add__, *(module.load for module in modules_of(function))]
        if any(map(tl.core.is_builtin, members)):
            return patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_what_is_left


def skip_ignored_overflow_checks() -> None:
    """Compute integers once.

    The interpreter recomputes every sum, difference and product in 64 bits, and then asserts equality only if its
    option `debug` is set.
    """
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "overflow would be reported"
    builder.options = replace(builder.options, sanitize_overflow=False)


def keep_numpy_types() -> None:
    """Look up the NumPy type of each Triton type once, instead of building the table for every look-up."""
    look_up, known = interpreter._get_np_dtype, {}

    def numpy_type(of: Any) -> Any:
        name = of.scalar.name
        if name not in known:
            known[name] = look_up(of)
        return known[name]

    interpreter._get_np_dtype = numpy_type


def keep_shapes() -> None:
    """Share the constants that are the shape of a tensor among all tensors of that shape."""

    @cache
    def constants(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.constexpr(prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])

    def initialize(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = constants(tuple(type.shape.values) if type.is_block() else ())

    tl.tensor.__init__ = initialize


def keep_block_types() -> None:
    """Check and name each type of blocks once."""
    initialize, known = tl.block_type.__init__, {}

    def initialize_again(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        if key not in known:
            initialize(self, element_ty, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key], element_ty=element_ty)

    tl.block_type.__init__ = initialize_again


def broadcast_only_other_shapes() -> None:
    """Return operands of one shape as they are, without comparing each size; `keep_shapes` shares shapes."""
    broadcast = TritonSemantic.broadcast_impl_value

    def broadcast_others(self: Any, one: Any, other: Any) -> Any:
        return (one, other) if one.shape is other.shape else broadcast(self, one, other)

    TritonSemantic.broadcast_impl_value = broadcast_others


def reduce_whole_blocks() -> None:
    """Reduce with a kernel's own function by combining neighbours of a whole block at once.

    The interpreter calls the function for each element.
    """

    def reduce_by_halves(self: Any, given: Any) -> list[Any]:
        values, axis = self.unravel(given, self.axis)
        parts, types = [value.handle.data for value in values], [value.dtype for value in values]
        before = (slice(None),) * axis
        while parts[0].shape[axis] > 1:
            pairs = [part[(*before, slice(first, None, 2))] for first in (0, 1) for part in parts]
            found = self.combine_fn.fn(*map(self.to_tensor, pairs, types * 2))
            parts = [one.handle.data for one in (found if isinstance(found, tuple) else (found,))]
        if not self.keep_dims:
            parts = [part[(*before, 0)] for part in parts]
        elif self.axis is None:
            parts = [part.reshape((1,) * given[0].handle.data.ndim) for part in parts]
        return list(map(self.to_tensor, parts, types))

    interpreter.ReduceOps.generic_reduce = reduce_by_halves
