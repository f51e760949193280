"""A word is suggested only where it is near enough to be what was meant."""

from __future__ import annotations

import pytest

from paceline.errors import expected, meant

MODELS = ["mlp", "cnn", "lenet5", "resnet18", "vgg16"]
POLICIES = ["equal", "level", "dolbie", "lbbsp", "auto", "oracle"]


@pytest.mark.parametrize(
    ("word", "known", "near"),
    [
        ("lenet", MODELS, "lenet5"),
        ("lennet5", MODELS, "lenet5"),
        ("resnet81", MODELS, "resnet18"),
        ("vgg19", MODELS, "vgg16"),
        ("res", MODELS, "resnet18"),
        ("levle", POLICIES, "level"),
        ("dolby", POLICIES, ""),
        ("dolbi", POLICIES, "dolbie"),
        ("alexnet", MODELS, ""),
        ("transformer", MODELS, ""),
        ("densenet", MODELS, ""),
        ("efficientnet", MODELS, ""),
        ("panel", POLICIES, ""),
        ("bps", ["asp", "bsp", "lsp", "ssp"], "bsp"),
        ("dbv", ["adasync", "blind", "dbw", "everyone", "static"], "dbw"),
        ("rya", ["torch", "ray"], "ray"),
        ("cpu", ["gpu-wide", "all"], ""),
        ("--worker", ["--workers", "--port"], "--workers"),
        ("--wokers", ["--workers", "--port"], "--workers"),
        ("--gloabl-btach", ["--global-batch", "--port"], "--global-batch"),
    ],
)
def test_only_what_is_near_is_suggested(word, known, near):
    assert meant(word, known) == (f"; did you mean {near}?" if near else "")


def test_without_a_suggestion_all_words_are_listed():
    assert expected("alexnet", MODELS) == "; expected one of mlp, cnn, lenet5, resnet18, vgg16"
