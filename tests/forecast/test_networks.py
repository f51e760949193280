"""Networks: derivatives against finite differences, outputs against torch with the same weights."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.forecast.networks import Network, Perceptron, RecurrentNetwork

NETWORKS: list[Network] = [
    Perceptron(8, 1),
    Perceptron(6, 2),
    RecurrentNetwork(2, 4),
    RecurrentNetwork(3, 4, lstm=True),
]


def case(network: Network, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    features = network.features  # type: ignore[attr-defined]
    start = np.stack([network.draw(rng) for _ in range(3)])
    return start + 0.3 * rng.normal(size=start.shape), rng.normal(size=(3, 5, features))


@pytest.mark.parametrize("network", NETWORKS, ids=str)
def test_jacobian_against_central_differences(network: Network) -> None:
    """LB-BSP, eq. (4)."""
    parameters, inputs = case(network)
    output, jacobian = network.jacobian(parameters, inputs)
    assert jacobian.shape == (3, 5, network.parameters)
    np.testing.assert_allclose(output, network.forward(parameters, inputs), rtol=1e-14)
    h = 1e-6
    for p in range(network.parameters):
        step = np.zeros(network.parameters)
        step[p] = h
        slope = (network.forward(parameters + step, inputs) - network.forward(parameters - step, inputs)) / (
            2 * h
        )
        np.testing.assert_allclose(jacobian[..., p], slope, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("network", [n for n in NETWORKS if isinstance(n, RecurrentNetwork)], ids=str)
def test_recurrent_forward_against_torch(network: RecurrentNetwork) -> None:
    """LB-BSP, Table 3 (SimpleRNN, LSTM)."""
    torch = pytest.importorskip("torch")
    parameters, inputs = case(network, seed=1)
    ours = network.forward(parameters, inputs)
    for model in range(3):
        enter, repeat, bias, readout, level = (torch.from_numpy(x[model]) for x in network._parts(parameters))
        kind = torch.nn.LSTM if network.lstm else torch.nn.RNN
        layer = kind(1, network.hidden, batch_first=True).double()
        with torch.no_grad():
            layer.weight_ih_l0.copy_(enter[:, None])
            layer.weight_hh_l0.copy_(repeat)
            layer.bias_ih_l0.copy_(bias)
            layer.bias_hh_l0.zero_()
            hidden, _ = layer(torch.from_numpy(inputs[model])[..., None])
            theirs = hidden[:, -1] @ readout + level
        np.testing.assert_allclose(ours[model], theirs.numpy(), rtol=1e-12)
