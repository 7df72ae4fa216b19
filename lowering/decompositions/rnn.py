"""The fused cells of LSTM and GRU, which PyTorch calls on devices other than the CPU."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def lstm_cell(
    of_input: torch.Tensor,
    of_hidden: torch.Tensor,
    cell: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decompose `aten._thnn_fused_lstm_cell`.

    Args:
        of_input: `[N, 4 * H]`, the input times its weight.
        of_hidden: `[N, 4 * H]`, the hidden state times its weight.
        cell: `[N, H]`, the cell's state.
        input_bias: `[4 * H]` or None, as the next.
        hidden_bias: of the hidden state's product.

    Returns:
        The hidden state and the cell's, `[N, H]`, and the gates, `[N, 4 * H]`, for the backward.
    Source: `torch.nn.LSTMCell`.
    """
    gates = _with_bias(of_input, input_bias) + _with_bias(of_hidden, hidden_bias)
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = torch.sigmoid(i), torch.sigmoid(f), torch.tanh(g), torch.sigmoid(o)
    state = f * cell + i * g
    return o * torch.tanh(state), state, torch.cat([i, f, g, o], 1)


def lstm_cell_backward(
    grad_hidden: torch.Tensor | None,
    grad_state: torch.Tensor | None,
    cell: torch.Tensor,
    state: torch.Tensor,
    gates: torch.Tensor,
    has_bias: bool,
) -> Any:
    """Decompose `aten._thnn_fused_lstm_cell_backward_impl`.

    Args:
        grad_hidden: gradient of the hidden state, `[N, H]`, or None.
        grad_state: gradient of the cell's new state, `[N, H]`, or None.
        cell: the cell's state before.
        state: the cell's state after.
        gates: what `lstm_cell` returned last.
        has_bias: whether the last result is wanted.

    Returns:
        The gradients of the gates before their activation, `[N, 4 * H]`, of the cell's state
        before, `[N, H]`, and of the bias, `[4 * H]`.
    """
    i, f, g, o = gates.chunk(4, 1)
    bent = torch.tanh(state)
    of_hidden = torch.zeros_like(cell) if grad_hidden is None else grad_hidden
    of_state = of_hidden * o * (1 - bent * bent)
    of_state = of_state if grad_state is None else of_state + grad_state
    of_gates = [
        of_state * g * i * (1 - i),
        of_state * cell * f * (1 - f),
        of_state * i * (1 - g * g),
        of_hidden * bent * o * (1 - o),
    ]
    whole = torch.cat(of_gates, 1)
    return whole, of_state * f, whole.sum(0) if has_bias else None


def gru_cell(
    of_input: torch.Tensor,
    of_hidden: torch.Tensor,
    hidden: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decompose `aten._thnn_fused_gru_cell`.

    Args:
        of_input: `[N, 3 * H]`, the input times its weight.
        of_hidden: `[N, 3 * H]`, the hidden state times its weight.
        hidden: `[N, H]`, the hidden state.
        input_bias: `[3 * H]` or None, as the next.
        hidden_bias: of the hidden state's product.

    Returns:
        The hidden state, `[N, H]`, and what the backward reads, `[N, 5 * H]`.
    Source: `torch.nn.GRUCell`.
    """
    ir, iz, ia = _with_bias(of_input, input_bias).chunk(3, 1)
    hr, hz, ha = _with_bias(of_hidden, hidden_bias).chunk(3, 1)
    reset, update = torch.sigmoid(ir + hr), torch.sigmoid(iz + hz)
    new = torch.tanh(ia + reset * ha)
    return new + update * (hidden - new), torch.cat([reset, update, new, hidden, ha], 1)


def gru_cell_backward(grad: torch.Tensor, saved: torch.Tensor, has_bias: bool) -> Any:
    """Decompose `aten._thnn_fused_gru_cell_backward`.

    Args:
        grad: gradient of the hidden state, `[N, H]`.
        saved: what `gru_cell` returned last.
        has_bias: whether the last two results are wanted.

    Returns:
        The gradients of the two products, `[N, 3 * H]`, of the hidden state before, `[N, H]`, and
        of the two biases, `[3 * H]`.
    """
    reset, update, new, hidden, ha = saved.chunk(5, 1)
    of_update = grad * (hidden - new) * update * (1 - update)
    of_new = grad * (1 - update) * (1 - new * new)
    of_reset = of_new * ha * reset * (1 - reset)
    of_input = torch.cat([of_reset, of_update, of_new], 1)
    of_hidden = torch.cat([of_reset, of_update, of_new * reset], 1)
    of_biases = [t.sum(0) if has_bias else None for t in (of_input, of_hidden)]
    return of_input, of_hidden, grad * update, *of_biases


def _with_bias(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x if bias is None else x + bias


DECOMPOSITIONS = {
    aten._thnn_fused_gru_cell.default: gru_cell,
    aten._thnn_fused_gru_cell_backward.default: gru_cell_backward,
    aten._thnn_fused_lstm_cell.default: lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_cell_backward,
}
