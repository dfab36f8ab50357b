"""Triton 3.6's interpreter, patched for NumPy 2.4 and for speed.

A kernel here is some thousand operations on small arrays, of which NumPy takes a tenth of the time and the
interpreter's types the rest; redundant computations are skipped or cached.
"""

from dataclasses import replace
from functools import cache
from inspect import unwrap
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
    call_builtins_directly()
    skip_ignored_overflow_checks()
    keep_numpy_types()
    keep_shapes()
    keep_block_types()
    keep_sizes()
    unwrap_constants_only()
    agree_on_types_once()
    cast_at_once()
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


def call_builtins_directly() -> None:
    """Give builtins their semantics in one call, instead of by way of three that copy the arguments by name."""

    def patch_attribute(owner: Any, name: str, member: Any, _builder: Any, scope: Any) -> None:
        function, semantics = unwrap(member), interpreter.interpreter_semantic

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantics
            return function(*args, **named)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch_attribute


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
    scalar = tl.constexpr(1), tl.tuple([])

    def initialize(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.constants if type.is_block() else scalar

    tl.tensor.__init__ = initialize


def keep_block_types() -> None:
    """Check and name each type of blocks once, and make the constants of its shape."""
    initialize, known, types = tl.block_type.__init__, {}, {}

    @cache
    def constants(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.constexpr(prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])

    def initialize_again(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        key = element_ty.name, sizes
        if key not in known:
            initialize(self, element_ty, list(sizes))
            known[key] = dict(vars(self), sizes=sizes, constants=constants(sizes))
        vars(self).update(known[key], element_ty=element_ty)

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        key = scalar_ty.name, self.sizes
        if key not in types:
            types[key] = tl.block_type(scalar_ty, self.sizes)
        return types[key]

    tl.block_type.__init__ = initialize_again
    tl.block_type.with_element_ty = with_element_ty


def keep_sizes() -> None:
    """Compare the size of elements with that of their type, or of a pointer, by a table."""

    names = [*tl.dtype.SINT_TYPES, *tl.dtype.UINT_TYPES, *tl.dtype.FP_TYPES]
    sizes = {name: max(tl.dtype(name).itemsize, 1) for name in names}

    def fits(data: Any, kind: Any) -> bool:
        return data.itemsize <= sizes.get(kind.name, 8)

    interpreter._validate_np_data_size = fits


def unwrap_constants_only() -> None:
    """Return tensors, types and numbers as they are, without asking whether they are lists of constants."""
    unwrap_any, plain = tl.core._unwrap_if_constexpr, {tl.tensor, tl.dtype, int, float, bool, str, type(None)}

    def unwrap_constant(given: Any) -> Any:
        return given if type(given) in plain else unwrap_any(given)

    tl.core._unwrap_if_constexpr = unwrap_constant


def agree_on_types_once() -> None:
    """Skip conversions of operands of one type, and convert each number to the type of the other operand once."""
    check, converted, agreed = TritonSemantic.binary_op_type_checking_impl, {}, {}

    def tensors(self: Any, lhs: Any, rhs: Any, options: tuple[bool, bool, bool, bool]) -> Any:
        key = lhs.dtype.name, rhs.dtype.name, options
        if key not in agreed:
            found = check(self, lhs, rhs, *options)
            same = found[0].dtype is lhs.dtype and found[1].dtype is rhs.dtype
            agreed[key] = None if same else (found[0].dtype, found[1].dtype)
        if (types := agreed[key]) is not None:
            lhs, rhs = self.cast(lhs, types[0]), self.cast(rhs, types[1])
        return self.broadcast_impl_value(lhs, rhs)

    def checked(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        options = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        left, right = type(lhs) is tl.tensor, type(rhs) is tl.tensor
        if left and right:
            return tensors(self, lhs, rhs, options)
        if left == right or not arithmetic_check:
            return check(self, lhs, rhs, *options)
        tensor, number = (lhs, rhs) if left else (rhs, lhs)
        key = tensor.type.name, type(number), number, left, options
        if key not in converted:
            found = check(self, lhs, rhs, *options)
            if found[not left] is not tensor:
                return found
            found[left].handle.data.flags.writeable = False
            converted[key] = found[left]
        return (tensor, converted[key]) if left else (converted[key], tensor)

    TritonSemantic.binary_op_type_checking_impl = checked


def cast_at_once() -> None:
    """Convert between the types that NumPy has without asking what kinds of types they are."""
    cast, plain = TritonSemantic.cast, {tl.float16, tl.float32, tl.float64, tl.int8, tl.int16, tl.int32, tl.int64}
    plain |= {tl.uint8, tl.uint16, tl.uint32, tl.uint64}
    names = {kind.name for kind in plain}

    def cast_plain(self: Any, given: Any, target: Any, fp_downcast_rounding: Any = None) -> Any:
        kind = target.scalar
        if given.dtype.name == kind.name:
            return given
        if fp_downcast_rounding is not None or kind.name not in names or given.dtype.name not in names:
            return cast(self, given, target, fp_downcast_rounding)
        data = given.handle.data.astype(interpreter._get_np_dtype(kind))
        return tl.tensor(interpreter.TensorHandle(data, kind), given.type.with_element_ty(kind))

    TritonSemantic.cast = cast_plain


def broadcast_only_other_shapes() -> None:
    """Broadcast to sizes that are computed once for each pair of shapes, and nothing that has them already.

    NumPy's functions for broadcasting and for new axes take longer than a copy of a small block.
    """
    broadcast, expand, joint = (
        TritonSemantic.broadcast_impl_value,
        TritonSemantic.expand_dims,
        cache(np.broadcast_shapes),
    )

    def broadcast_others(self: Any, one: Any, other: Any) -> Any:
        if one.shape is other.shape:
            return one, other
        left, right = one.type, other.type
        if not right.is_block():
            return one, spread(other, left.with_element_ty(right))
        if not left.is_block():
            return spread(one, right.with_element_ty(left)), other
        if len(left.sizes) != len(right.sizes):
            return broadcast(self, one, other)
        sizes = joint(left.sizes, right.sizes)
        if left.sizes != sizes:
            one = spread(one, tl.block_type(one.dtype, sizes))
        if right.sizes != sizes:
            other = spread(other, tl.block_type(other.dtype, sizes))
        return one, other

    def spread(tensor: Any, block: Any) -> Any:
        return tl.tensor(create_broadcast(None, tensor.handle, block.sizes), block)

    def create_broadcast(_builder: Any, arg: Any, shape: Any) -> Any:
        data = np.empty(shape, arg.data.dtype)
        data[...] = arg.data
        return interpreter.TensorHandle(data, arg.dtype.scalar)

    def expand_dims(self: Any, given: Any, axis: int) -> Any:
        if not given.type.is_block() or axis < 0:
            return expand(self, given, axis)
        sizes = given.type.sizes
        sizes = *sizes[:axis], 1, *sizes[axis:]
        handle = interpreter.TensorHandle(given.handle.data.reshape(sizes), given.handle.dtype.scalar)
        return tl.tensor(handle, tl.block_type(given.dtype, sizes))

    TritonSemantic.broadcast_impl_value = broadcast_others
    TritonSemantic.expand_dims = expand_dims
    interpreter.InterpreterBuilder.create_broadcast = create_broadcast


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
