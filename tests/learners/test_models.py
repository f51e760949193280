"""The models: published parameter counts, shapes they take, and what is said of those they do not."""

import pytest
import torch

from paceline.errors import PacelineError
from paceline.learners import models
from paceline.learners.models import PadOrResize


def parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "shape", "count"),
    [
        ("cnn", (1, 28, 28), 10 * 25 + 10 + 20 * 10 * 25 + 20 + 320 * 50 + 50 + 50 * 10 + 10),
        ("lenet5", (1, 32, 32), 61_706),
        ("lenet5", (1, 28, 28), 61_706),
        ("lenet5", (3, 32, 32), 62_006),
        ("resnet18", (3, 32, 32), 11_173_962),
        ("vgg16", (3, 32, 32), 14_728_266),
        ("mlp", (1, 8, 8), 64 * 64 + 64 + 64 * 10 + 10),
    ],
)
def test_published_parameter_counts(name, shape, count):
    with torch.device("meta"):
        assert parameters(models.create(name, shape)) == count


def test_the_original_vgg16():
    """Without batch norm, for images of 3 x 224 x 224: the same convolutions under three linear layers."""
    relu, drop = torch.nn.ReLU(), torch.nn.Dropout()
    with torch.device("meta"):
        first, second, third = (
            torch.nn.Linear(*sizes) for sizes in ((512 * 49, 4096), (4096, 4096), (4096, 1000))
        )
        features = models.create("vgg16", (3, 32, 32))[1]
        plain = [layer for layer in features if not isinstance(layer, torch.nn.BatchNorm2d)]
        model = torch.nn.Sequential(*plain, torch.nn.Flatten(), first, relu, drop, second, relu, drop, third)
        assert parameters(model) == 138_357_544
        assert model(torch.empty(1, 3, 224, 224)).shape == (1, 1000)


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 37, 50)])
@pytest.mark.parametrize("name", models.BUILDERS)
def test_every_model_takes_every_image(name, shape):
    with torch.device("meta"):
        model = models.create(name, shape, classes=7)
        assert model(torch.empty(5, *shape)).shape == (5, 7)


def test_gradients_reach_every_parameter():
    torch.manual_seed(0)
    for name in models.BUILDERS:
        model = models.create(name, (1, 8, 8))
        model(torch.rand(4, 1, 8, 8)).square().sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters()), name
        assert torch.isfinite(torch.cat([p.grad.flatten() for p in model.parameters()])).all()


def test_a_border_keeps_the_image_and_the_seed_keeps_the_weights():
    x = torch.rand(2, 1, 28, 28)
    assert torch.equal(PadOrResize(32)(x)[:, :, 2:30, 2:30], x)
    assert PadOrResize(32)(x).sum() == pytest.approx(x.sum().item(), rel=1e-5)
    torch.manual_seed(3)
    one = models.create("lenet5", (1, 28, 28))
    torch.manual_seed(3)
    two = models.create("lenet5", (1, 28, 28))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("alexnet", (1, 8, 8)), "'alexnet' is unknown; .*xpected one of mlp, cnn, lenet5, resnet18, vgg16"),
        (("mlp", (8, 8)), r"shape \(8, 8\)"),
        (("mlp", (0, 8, 8)), r"shape \(0, 8, 8\)"),
        (("mlp", (1, 8, 8), 1), "classes=1"),
    ],
)
def test_bad_requests_raise_one_error(arguments, words):
    with pytest.raises(PacelineError, match=words):
        models.create(*arguments)
