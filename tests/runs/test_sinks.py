"""Each sink gets the record's rounds, told by the sink's own package reading them back."""

from __future__ import annotations

import json
import re
import struct
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from paceline.errors import PacelineError
from paceline.runs import sinks
from paceline.runs.sinks import PrometheusSink
from support.events import until

GUARANTEES = (
    "A tracker that fails causes one warning and the training continues; a missing package or a wrong "
    "port raises before it.",
)

SLOW = np.array([0.001, 0.001, 0.001, 0.004])
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(ran):
    """Five rounds of 64 ms: three workers wait 48 ms of each for the fourth."""
    return ran("mine", 16, SLOW, rounds=5)


def assert_told(values, run):
    """values: what a sink tells of each name, a number for each of the run's rounds."""
    assert values["round/seconds"] == pytest.approx([0.064] * 5)
    assert values["round/samples_per_second"] == pytest.approx([1000] * 5)
    assert values["train/loss"] == pytest.approx(run.loss.tolist())
    assert values["round/idle_share"] == pytest.approx([3 * 48 / (4 * 64)] * 5)
    assert values["load/worker_3"] == [16] * 5
    assert values["compute_seconds/worker_3"] == pytest.approx([0.064] * 5)


NAMES = [
    *("round/seconds", "round/samples_per_second", "round/idle_share", "train/loss"),
    *("load/worker_3", "compute_seconds/worker_3"),
]


def test_tensorboard(run):
    pytest.importorskip("tensorboard")
    pytest.importorskip("torch")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert sinks.write(run, "tensorboard") == f"TensorBoard: tensorboard --logdir {run.path / 'tensorboard'}"
    board = EventAccumulator(str(run.path / "tensorboard"))
    board.Reload()
    assert [event.step for event in board.Scalars("round/seconds")] == [0, 1, 2, 3, 4]
    assert_told({name: [event.value for event in board.Scalars(name)] for name in NAMES}, run)


def logged(content):
    """The records in a log file: blocks of 32 KiB, in which records, or parts of them, follow headers of 7 bytes."""
    at, parts = 7, b""  # behind the file's own header
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_weights_and_biases_offline(run, monkeypatch):
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    assert "project uneven" in sinks.write(run, "wandb:project=uneven")
    (log,) = run.path.glob("wandb/offline-run-*/run-*.wandb")

    def records():
        return [wandb_internal_pb2.Record.FromString(data) for data in logged(log.read_bytes())]

    until(lambda: any(record.HasField("exit") for record in records()))  # its own process writes them
    found = {}
    for record in records():
        for item in record.history.item:
            name = item.key or "/".join(item.nested_key)
            found.setdefault(name, []).append(json.loads(item.value_json))
    assert found["_step"] == [0, 1, 2, 3, 4]
    assert_told(found, run)


@pytest.mark.parametrize("store", ["sqlite:///{}/mlflow.db", "file://{}/mlruns"])
def test_mlflow_in_a_database_and_in_files(run, tmp_path, monkeypatch, store):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # which newer versions ask for
    uri = store.format(tmp_path)
    sinks.write(run, f"mlflow:experiment=uneven,uri={uri}")
    client = MlflowClient(uri)
    (kept,) = client.search_runs([client.get_experiment_by_name("uneven").experiment_id])
    assert kept.info.run_name == "mine"
    assert kept.info.status == "FINISHED"
    assert kept.data.params["policy"] == "level"
    told = {name: client.get_metric_history(kept.info.run_id, name) for name in NAMES}
    assert [metric.step for metric in told["round/seconds"]] == [0, 1, 2, 3, 4]
    assert_told({name: [metric.value for metric in metrics] for name, metrics in told.items()}, run)


def test_trackio(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    assert "trackio show --project uneven" in sinks.write(run, "trackio:project=uneven")
    rows = SQLiteStorage.get_logs("uneven", "mine")
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert_told({name: [row[name] for row in rows] for name in NAMES}, run)


def scraped(sink):
    """What Prometheus would read: each sample by its name with its labels."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        (sample.name, sample.labels.get("worker")): sample.value
        for family in families
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_prometheus(run):
    pytest.importorskip("prometheus_client")
    sink = sinks.create("prometheus:port=0", run.path, run.config)
    try:
        for t in range(5):
            sink.round(
                round=t, seconds=0.064, batch=64, loads=run.loads[t], compute=run.compute[t], loss=run.loss[t]
            )
        told = scraped(sink)
        with pytest.raises(PacelineError, match=f"cannot serve metrics on 127.0.0.1:{sink.port}: .*in use"):
            sinks.create(f"prometheus:port={sink.port}", run.path, run.config)
    finally:
        sink.close()
    assert told["paceline_rounds_total", None] == 5
    assert told["paceline_samples_total", None] == 320
    assert told["paceline_round_seconds_sum", None] == pytest.approx(0.32)
    assert told["paceline_loss", None] == pytest.approx(run.loss[-1])
    assert told["paceline_worker_samples", "3"] == 16
    assert told["paceline_worker_seconds", "0"] == pytest.approx(0.016)
    assert told["paceline_worker_wait_seconds_total", "0"] == pytest.approx(5 * 0.048)
    assert told["paceline_worker_wait_seconds_total", "3"] == 0


def test_dashboard_asks_for_metrics_that_a_run_sends(run):
    pytest.importorskip("prometheus_client")
    board = json.loads((ROOT / "examples" / "launch" / "grafana.json").read_text())
    asked = {
        word
        for panel in board["panels"]
        for target in panel["targets"]
        for word in re.findall(r"paceline_\w+", target["expr"])
    }
    sink = sinks.create("prometheus", run.path, run.config)
    try:
        sink.round(round=0, seconds=0.064, batch=64, loads=[16] * 4, compute=run.compute[0], loss=1.0)
        told = {name for name, _ in scraped(sink)} | {"paceline_round_seconds_bucket"}
    finally:
        sink.close()
    assert asked
    assert asked <= told


@pytest.mark.parametrize(
    ("name", "package", "words"),
    [
        ("tensorboard", "torch.utils.tensorboard", "pip install tensorboard"),
        ("wandb", "wandb", "pip install wandb"),
        ("mlflow", "mlflow.entities", "pip install mlflow"),
        ("trackio", "trackio", "pip install trackio"),
        ("prometheus", "prometheus_client", "pip install prometheus-client"),
    ],
)
def test_missing_package_is_named(tmp_path, monkeypatch, name, package, words):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PacelineError, match=words):
        sinks.create(name, tmp_path, {})


def test_an_unknown_sink_is_refused(tmp_path):
    with pytest.raises(PacelineError, match=r"sink 'wand' is unknown; did you mean wandb\?"):
        sinks.create("wand", tmp_path, {})
    with pytest.raises(PacelineError, match="metrics port=70000: expected a whole number, 0 to 65,535"):
        PrometheusSink(tmp_path, {}, port=70000)
