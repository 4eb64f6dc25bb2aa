"""What torch asks a driver for before its dispatcher, and shapes of what it computes."""

from functools import partial

import torch

aten = torch.ops.aten


def leaves(args, kwargs):
    """All arguments, those in lists too."""
    found = []
    for one in (*args, *kwargs.values()):
        if isinstance(one, (list, tuple)):
            found += one
        else:
            found.append(one)
    return found


def each(change, args, kwargs):
    """The arguments, each changed."""

    def one(value):
        if isinstance(value, (list, tuple)):
            return [change(item) for item in value]
        return change(value)

    return tuple(map(one, args)), {name: one(value) for name, value in kwargs.items()}


_KNOWN_SHAPES = {}


def shapes(func, args, kwargs):
    """Unwritten results of the right shapes."""
    key = (
        func,
        _frozen(args),
        *((name, _frozen(value)) for name, value in kwargs.items()),
    )
    known = _KNOWN_SHAPES.get(key)
    if known is None:
        args, kwargs = each(_meta, args, kwargs)
        results = func(*args, **kwargs)
        one = isinstance(results, torch.Tensor)
        known = (
            one,
            [
                (tuple(result.shape), result.stride(), result.dtype)
                for result in ([results] if one else results)
            ],
        )
        _KNOWN_SHAPES[key] = known
    one, facts = known
    made = [_nothing(*fact) for fact in facts]
    return made[0] if one else tuple(made)


def _frozen(value):
    """What of an argument decides about shapes."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(_frozen, value))
    return value


def _meta(leaf):
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty_strided(
        leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta"
    )


def _nothing(shape, strides, dtype):
    made = torch.empty_strided(shape, strides, dtype=dtype)
    return made.fill_(torch.nan) if made.is_floating_point() else made.fill_(-1)


def contiguous(tensor):
    """The same tensor if its rows lie one after the other, else a copy."""
    if tensor.is_contiguous():
        return tensor
    return aten.clone.default(tensor, memory_format=torch.contiguous_format)


def _indices(index):
    return index if isinstance(index, tuple) else (index,)


def _positions(index):
    return [one if isinstance(one, torch.Tensor) else None for one in _indices(index)]


def item(tensor, index):
    """``tensor[index]`` by views and gathers."""
    axis = 0
    given = _indices(index)
    picked = [None] * tensor.dim()
    for place, one in enumerate(given):
        if one is Ellipsis:
            later = [x for x in given[place + 1 :] if x is not None]
            axis = tensor.dim() - len(later)
        elif one is None:
            tensor = tensor.unsqueeze(axis)
            picked.insert(axis, None)
            axis += 1
        elif isinstance(one, slice):
            tensor = aten.slice.Tensor(tensor, axis, one.start, one.stop, one.step or 1)
            axis += 1
        elif isinstance(one, torch.Tensor):
            picked[axis] = one
            axis += one.dim() if one.dtype == torch.bool else 1
        else:
            tensor = tensor.select(axis, int(one))
            picked.pop(axis)
    if any(one is not None for one in picked):
        return aten.index.Tensor(tensor, picked[: tensor.dim()])
    return tensor


def assign(tensor, index, value):
    """``tensor[index] = value``."""
    if any(isinstance(one, torch.Tensor) for one in _indices(index)):
        return tensor.index_put_(_positions(index), value)
    target = item(tensor, index)
    if isinstance(value, torch.Tensor):
        return aten.copy_.default(target, value)
    return target.fill_(value)


def _on_the_host(func, tensor, *args):
    return func(aten._to_copy.default(tensor, device="cpu"), *args)


ANSWERS = {
    torch.Tensor.__getitem__: item,
    torch.Tensor.__setitem__: assign,
    torch.Tensor.__invert__: aten.bitwise_not.default,
    torch.Tensor.contiguous: contiguous,
    torch.Tensor.copy_: aten.copy_.default,
    torch.Tensor.nonzero: aten.nonzero.default,
    **{
        func: partial(_on_the_host, func)
        for func in (
            torch.Tensor.__bool__,
            torch.Tensor.__float__,
            torch.Tensor.__index__,
            torch.Tensor.__int__,
            torch.Tensor.item,
            torch.Tensor.tolist,
        )
    },
}
"""Methods whose bindings look for a driver -> the same without."""
