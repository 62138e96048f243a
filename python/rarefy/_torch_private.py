"""Every private name of torch that Rarefy uses, and what is lost with a torch that does not have it.

tests/python/test_torch_private.py has a test for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

try:
    # torch.autograd.Function without the Python in front of `apply`, and without the higher-order operator
    # that torch.func wants there: as a kernel of the dispatcher it is one level of torch.func.
    class Function(torch.autograd.function._SingleLevelFunction):
        @staticmethod
        def _compiled_autograd_key(ctx: Any) -> tuple:
            return (ctx._autograd_function_id,)  # as of torch.autograd.Function

    allow_function = torch._functorch.utils.enable_single_level_autograd_function
    _below_autograd = torch._C._AutoDispatchBelowAutograd
    _in_torch_func = torch._C._are_functorch_transforms_active
    _in_autocast = torch._C._is_any_autocast_enabled
    _dispatch_modes = torch._C._len_torch_dispatch_stack
    _tracing = torch._C._is_tracing
    _set_forward_mode = forward_ad._set_fwd_grad_enabled
    forward_ad._current_level  # noqa: B018
    autograd_kernels = True
except AttributeError:
    # torch.library.register_autograd does instead: slower, an error under torch.func, no forward mode.
    Function = torch.autograd.Function
    autograd_kernels = False


def raw_stream(tensor: torch.Tensor) -> int:
    """The current stream of this tensor's GPU, as a number; torch.cuda.current_stream takes 1 µs more."""
    try:
        return torch._C._cuda_getCurrentRawStream(tensor.get_device())
    except AttributeError:
        return torch.cuda.current_stream(tensor.device).cuda_stream


# A tensor subclass without memory, which says what happens to it; without it, layers never wait (chain.py).
wrappers = hasattr(torch.Tensor, "_make_wrapper_subclass") and autograd_kernels


def wrapper_tensor(kind: type, size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
    """An object of a subclass of Tensor with sizes and no memory."""
    return torch.Tensor._make_wrapper_subclass(kind, size, dtype=dtype, device=device)


# Where nn.Module keeps what users register on a module; there are no public names.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS += ("_state_dict_hooks", "_state_dict_pre_hooks")
_HOOKS += ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def has_hooks(module: nn.Module) -> bool:
    """Whether anything is registered on this module that a new one in its place would lose."""
    return any(getattr(module, hooks, None) for hooks in _HOOKS)


def has_tensor_hooks(tensor: torch.Tensor) -> bool:
    """Whether a hook waits for this tensor's gradient, which another tensor in its place would lose."""
    return any(getattr(tensor, hooks, None) for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"))


def storage_of(tensor: torch.Tensor) -> int:
    """What tensors on the same storage agree in, also without memory (meta); their addresses may not."""
    return tensor.untyped_storage()._cdata


# Types of tensors that nothing else has a say in: not the subclasses, which may hold no data.
PLAIN = (torch.Tensor, nn.Parameter)


def plain() -> bool:
    """Whether a call meets nothing but autograd on its way to a kernel."""
    return (
        not is_dynamo_compiling()
        and autograd_kernels
        and forward_ad._current_level < 0
        and not _in_torch_func()
        and not _in_autocast()
    )


def eager() -> bool:
    """The same, and nothing writes down what is called: no mode of the dispatcher, no torch.jit.trace."""
    return (
        not is_dynamo_compiling()
        and autograd_kernels
        and forward_ad._current_level < 0  # from here as plain(): a call costs small layers 0.1 µs
        and not _in_torch_func()
        and not _in_autocast()
        and not _dispatch_modes()
        and not _tracing()
    )


def unrecorded(*tensors: torch.Tensor | None) -> bool:
    """Whether nothing will ask for a derivative of a call with these, also one that is compiled."""
    if forward_mode() or in_torch_func():
        return False
    return not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors))


def in_autocast() -> bool:
    """Whether autocast is on for any device."""
    return _in_autocast() if autograd_kernels else any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def in_torch_func() -> bool:
    """Whether a transform of torch.func is on."""
    return autograd_kernels and _in_torch_func()


def forward_mode() -> bool:
    """Whether dual numbers may be around."""
    return autograd_kernels and forward_ad._current_level >= 0


def forward_mode_enabled() -> Any:
    """A context with forward mode on, which a Function turns off for its forward and its jvp."""
    return _set_forward_mode(True)


def below_autograd(op: Any) -> Callable[..., Any]:
    """How the forward of a Function calls an op: its kernel, or that of an outer level of torch.func."""
    call = getattr(op, "_op", None)  # without the Python around it
    if not autograd_kernels or call is None:
        return op

    def below(*args: Any) -> Any:
        try:
            if not _in_torch_func():
                with _below_autograd():
                    return call(*args)
            # A Function turns both modes off for its forward, but they belong to the outer levels, too.
            with _below_autograd(), torch.enable_grad(), _set_forward_mode(True):
                return call(*args)
        except IndexError as error:
            raise TypeError(*error.args) from None

    return below


def entry(op: Any) -> Callable[..., Any]:
    """An op without the Python around it; what is a TypeError arrives as an IndexError."""
    return getattr(op, "_op", op)


def eager_call(op: Any) -> Callable[..., Any]:
    """How a call that meets nothing and is not recorded enters an op that has no autograd kernel."""
    call = entry(op)  # below_autograd takes 0.7 µs more

    def eagerly(*args: Any) -> Any:
        try:
            return call(*args)
        except IndexError as error:
            raise TypeError(*error.args) from None

    return eagerly


def without_torch_function() -> Any:
    """A context in which a tensor subclass is asked nothing: its functions are those of any tensor."""
    return torch._C.DisableTorchFunctionSubclass()


def without_autocast(device_type: str, op: Callable[..., Any], *args: Any) -> Any:
    """Call an op below the autocast of this device type."""
    key = getattr(torch._C.DispatchKey, f"Autocast{device_type.upper()}")
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
        return op(*args)


def rename_type_errors(packet: Any) -> None:
    """Let calls of torch.ops.rarefy.X and its default overload raise TypeError.

    The library cannot throw it through torch and throws what arrives as IndexError. Calls from Python
    enter by `_op`, whatever the mode: renaming here costs 0.1 µs, a Python kernel ahead of the C++ one 8.
    """

    def checked(call: Callable[..., Any]) -> Callable[..., Any]:
        def renamed(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except IndexError as error:
                raise TypeError(*error.args) from None

        return renamed

    for owner in (packet, packet.default):
        if hasattr(owner, "_op"):
            owner._op = checked(owner._op)
