"""Speed traces: read what was written, and name the line that is wrong."""

import numpy as np
import pytest

from paceline.data.traces import Trace, read, write
from paceline.errors import PacelineError

GUARANTEES = (
    "Damaged images, traces and scenarios are refused with one message, traces with the line's number.",
)

HEADER = "round,worker,seconds_per_sample,overhead_seconds\n"
GOOD = "0,0,0.001,0\n0,1,0.004,0.5\n1,0,0.002,0\n1,1,0.008,0\n"


def save(folder, text):
    path = folder / "trace.csv"
    path.write_text(text)
    return path


def test_read(tmp_path):
    trace = read(save(tmp_path, HEADER + GOOD))
    assert trace.seconds_per_sample.tolist() == [[0.001, 0.004], [0.002, 0.008]]
    assert trace.overhead.tolist() == [[0, 0.5], [0, 0]]


def test_any_order_of_rows_and_columns_and_a_later_first_round(tmp_path):
    text = "n,worker,round,overhead_seconds,seconds_per_sample\nx,1,8,0,4\n\ny,0,7,0,1\nz,1,7,0,2\n,0,8,0,3\n"
    assert read(save(tmp_path, text)).seconds_per_sample.tolist() == [[1, 2], [3, 4]]


def test_written_is_read_back_exactly(tmp_path):
    random = np.random.default_rng(0)
    seconds, overhead = random.exponential(size=(2, 50, 7))
    seconds[3, 2] = overhead[3, 2] = np.nan
    seconds[:, 6] = overhead[:, 6] = np.nan
    path = write(tmp_path / "trace.csv", Trace(seconds, overhead))
    back = read(path, gaps="absent")
    assert np.array_equal(back.seconds_per_sample, seconds, equal_nan=True)
    assert np.array_equal(back.overhead, overhead, equal_nan=True)
    with pytest.raises(PacelineError, match=r"line 8: seconds_per_sample is nan"):
        read(path)


def test_a_missing_row_means_absent_when_asked(tmp_path):
    path = save(tmp_path, HEADER + "0,0,1,0\n0,1,,\n1,1,2,0\n")
    trace = read(path, gaps="absent")
    assert np.array_equal(trace.seconds_per_sample, [[1, np.nan], [np.nan, 2]], equal_nan=True)
    assert np.array_equal(trace.overhead, [[0, np.nan], [np.nan, 0]], equal_nan=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1: no column round"),
        ("round,worker,seconds_per_sample\n0,0,1\n", "line 1: no column overhead_seconds"),
        (HEADER, "no rows"),
        (HEADER + "\n\n", "no rows"),
        (HEADER + "0,0,1,0\n\n0,1,fast,0\n", "line 4: seconds_per_sample is 'fast'"),
        (HEADER + "0,0,1,0\n0,1,1\n", "line 3: no overhead_seconds"),
        (HEADER + "0,0,1,0\n\n0,1,0,0\n", "line 4: seconds_per_sample is 0; expected 1e-12 to 1e9 seconds"),
        (HEADER + "0,0,-1,0\n", "line 2: seconds_per_sample is -1"),
        (HEADER + "0,0,nan,0\n", "line 2: seconds_per_sample is nan"),
        (HEADER + "0,0,,0\n", "line 2: seconds_per_sample is nan"),
        (HEADER + "0,0,inf,0\n", "line 2: seconds_per_sample is inf"),
        (HEADER + "0,0,1,-2\n", "line 2: overhead_seconds is -2"),
        (HEADER + "0,0,1,0\n0,1,1e308,0\n", "line 3: seconds_per_sample is 1e\\+308; expected 1e-12 to 1e9"),
        (HEADER + "0,0,1e-300,0\n", "line 2: seconds_per_sample is 1e-300"),
        (HEADER + "0,0,1,1e10\n", "line 2: overhead_seconds is 1e\\+10; expected 0 to 1e9"),
        (HEADER + "0,0,1_0,0\n", "line 2: seconds_per_sample is '1_0'"),
        (HEADER + GOOD + "2,0,1,0\n2,1,1,0,0\n", "line 7: 5 fields; expected 4, as in the header"),
        (HEADER + GOOD + "2,0,1,0\n2,1,1,0,\n", "line 7: 5 fields"),
        (HEADER + '0,0,1,0\n0,1,"1",0,"x, y"\n', "line 3: 5 fields"),
        (
            "round,note,worker,seconds_per_sample,overhead_seconds,end\n0,a,0,1,0\n",
            "line 2: 5 fields; expected 6",
        ),
        ("round,worker,seconds_per_sample,overhead_seconds,round\n0,0,1,0,7\n", "line 1: 2 columns round"),
        (HEADER + "0,0,1,nan\n", "line 2: overhead_seconds is nan"),
        (HEADER + "0,0.5,1,0\n", "line 2: worker is 0.5"),
        (HEADER + "-1,0,1,0\n", "line 2: round is -1"),
        (HEADER + ",0,1,0\n", "line 2: round is nan"),
        (HEADER + "0,1,1,0\n", "line 2: worker 1 with no worker 0"),
        (HEADER + "0,0,1,0\n0,3,1,0\n0,1,1,0\n", "line 3: worker 3 with no worker 2"),
        (HEADER + GOOD + "1000000000000,0,1,0\n", "line 6: round 1000000000000 with no round"),
        (HEADER + GOOD + "1,0,1,0\n", "line 6: round 1 of worker 0 is given a second time"),
        (HEADER + GOOD + "2,0,1,0\n", "line 6: after this row worker 1 has none in round 2"),
        (HEADER + GOOD + "2,1,1,0\n", "line 5: after this row worker 0 has none in round 2"),
    ],
)
def test_bad_traces_name_the_line(tmp_path, text, words):
    with pytest.raises(PacelineError, match=words) as caught:
        read(save(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_few_rows_that_span_more_than_memory_holds(tmp_path):
    far = "".join(f"{t},0,1,0\n" for t in range(11_000)) + "".join(f"0,{i},1,0\n" for i in range(1, 11_000))
    with pytest.raises(PacelineError, match=r"11,000 rounds of 11,000 workers"):
        read(save(tmp_path, HEADER + far), gaps="absent")


def test_quoted_fields_and_other_columns(tmp_path):
    text = 'round,"worker",seconds_per_sample,overhead_seconds,note\n"0",0,1,0,"a, b"\r\n0,1,"2",0,\n'
    assert read(save(tmp_path, text)).seconds_per_sample.tolist() == [[1, 2]]


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(PacelineError, match="No such file"):
        read(tmp_path / "none.csv")
    path = tmp_path / "trace.csv"
    path.write_bytes(bytes(range(256)))
    with pytest.raises(PacelineError, match="not text"):
        read(path)
    with pytest.raises(PacelineError, match="cannot write"):
        write(tmp_path / "none" / "trace.csv", Trace(np.ones((1, 1)), np.zeros((1, 1))))
