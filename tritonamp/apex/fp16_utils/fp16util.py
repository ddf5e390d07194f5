"""Half models and FP32 masters, by hand."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from tritonamp.apex import amp_C
from tritonamp.apex.multi_tensor_apply import multi_tensor_applier

clip_grad_norm = nn.utils.clip_grad_norm_


class tofp16(nn.Module):
    """``input.half()`` as a module."""

    def forward(self, input: Tensor) -> Tensor:
        return input.half()


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Make the BatchNorms with weights in ``module`` FP32, in place, and return ``module``."""
    for norm in filter(_is_affine_batch_norm, module.modules()):
        norm.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Make ``network`` half except for its BatchNorms, in place.

    Returns:
        a layer that casts the input to half, followed by ``network``.
    """
    return nn.Sequential(tofp16(), BN_convert_float(network.half()))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating parameters, gradients and buffers of ``module``, not of its children."""
    for param in module.parameters(recurse=False):
        if param.is_floating_point():
            grad, param.grad = param.grad, None
            param.data = param.data.to(dtype)
            if grad is not None:
                param.grad = grad.to(dtype)
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast ``network`` in place, except for BatchNorms with weights, and return it."""
    for module in network.modules():
        if not _is_affine_batch_norm(module):
            convert_module(module, dtype)
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
    return network


def _is_affine_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine


class FP16Model(nn.Module):
    """``network`` in half except for BatchNorms with weights; inputs and outputs are half."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, torch.half)

    def forward(self, *inputs: Tensor) -> Any:
        return self.network(*(tensor.half() for tensor in inputs))


def prep_param_lists(
    model: nn.Module, flat_master: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the trainable parameters of ``model``, and their FP32 masters.

    Args:
        model: the model.
        flat_master: whether to make one master with the elements of all parameters.

    Raises:
        ValueError: ``flat_master`` for parameters of several dtypes.
    """
    model_params: list[Tensor] = [param for param in model.parameters() if param.requires_grad]
    if not flat_master:
        masters = [
            param.detach().to(torch.float32, copy=True).requires_grad_() for param in model_params
        ]
        return model_params, masters
    dtypes = {str(param.dtype) for param in model_params}
    if len(dtypes) > 1:
        raise ValueError(
            "prep_param_lists: flat_master=True: expected parameters of one dtype, got "
            f"{', '.join(sorted(dtypes))}: use flat_master=False"
        )
    master = nn.Parameter(parameters_to_vector(model_params).detach().to(torch.float32, copy=True))
    master.grad = torch.zeros_like(master)
    return model_params, [master]


@torch.no_grad()
def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy gradients to the masters; both lists are results of ``prep_param_lists``."""
    if flat_master:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model_params]
        master_params[0].grad = parameters_to_vector(grads).float()
        return
    for param, master in zip(model_params, master_params, strict=True):
        if param.grad is None:
            master.grad = None
        elif master.grad is None:
            master.grad = param.grad.to(master.dtype, copy=True)
        else:
            master.grad.copy_(param.grad)


@torch.no_grad()
def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Round the masters into the parameters; both lists are results of ``prep_param_lists``."""
    values = list(master_params)
    if flat_master:
        pieces = master_params[0].split([param.numel() for param in model_params])
        values = [piece.view_as(param) for piece, param in zip(pieces, model_params, strict=True)]
    unused = torch.zeros(1, dtype=torch.int32, device=values[0].device if values else None)
    multi_tensor_applier(amp_C.multi_tensor_scale, unused, [values, list(model_params)], 1.0)


def to_python_float(t: Any) -> Any:
    """Return the only value of a tensor or of a sequence. Waits for the device."""
    return t.item() if hasattr(t, "item") else t[0]
