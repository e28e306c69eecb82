"""The peak memory of a process between two moments."""

from __future__ import annotations

from pathlib import Path

import pytest

from buffer_rl.driver.production_metrics import joined_metrics
from buffer_rl.observe.memory import peak_metrics, take_peaks

MB = 1_000_000


class FakeDevice:
    """A GPU's allocator: its peak is set back to what is allocated."""

    def __init__(self, allocated: int, peak: int) -> None:
        self.allocated, self.peak = allocated, peak

    def max_memory_allocated(self) -> int:
        return self.peak

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.allocated


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="a system without procfs")
def test_memory_that_is_free_again_counts_until_the_next_take_and_no_longer() -> None:
    take_peaks()
    before = take_peaks()["host"]
    block = bytearray(200 * MB)  # above the allocator's threshold: its pages are mapped, and go back when it is freed
    block[::4096] = b"x" * len(block[::4096])
    del block

    assert take_peaks()["host"] == pytest.approx(before + 0.2, abs=0.02)
    assert take_peaks()["host"] == pytest.approx(before, abs=0.02)


def test_the_mark_is_read_in_gigabytes_and_set_back_by_the_kernel_s_number(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nVmPeak:\t 9000000 kB\nVmHWM:\t 2000000 kB\nVmRSS:\t 10 kB\n")

    assert take_peaks(folder=tmp_path) == {"host": 2.048}
    assert (tmp_path / "clear_refs").read_text() == "5"


def test_without_procfs_there_is_the_device_alone(tmp_path: Path) -> None:
    assert take_peaks(folder=tmp_path / "absent") == {}
    assert take_peaks(FakeDevice(1, 3_000 * MB), tmp_path / "absent") == {"device": 3.0}


def test_a_mark_that_cannot_be_set_back_is_reported_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("VmHWM:\t 2000000 kB\n")
    (tmp_path / "clear_refs").mkdir()

    assert take_peaks(folder=tmp_path) == {"host": 2.048}


def test_the_peak_of_a_device_is_counted_anew_after_each_take(tmp_path: Path) -> None:
    device = FakeDevice(allocated=500 * MB, peak=1_500 * MB)

    assert [take_peaks(device, tmp_path)["device"], take_peaks(device, tmp_path)["device"]] == [1.5, 0.5]


def test_of_several_processes_the_largest_counts() -> None:
    peaks = [{"host": 1.0, "device": 9.0}, {"host": 2.0}, {}]

    assert peak_metrics("actor", peaks) == {
        "perf/peak_memory/actor_gb": 2.0,
        "perf/peak_memory/actor_device_gb": 9.0,
    }
    assert peak_metrics("buffer", [{}]) == {}


def test_so_it_does_of_several_tickets() -> None:
    parts = [{"perf/peak_memory/rollout_gb": 3.0, "perf/reward_time": 3.0}, {"perf/peak_memory/rollout_gb": 1.0}]

    assert joined_metrics(parts, [1, 5]) == {"perf/peak_memory/rollout_gb": 3.0, "perf/reward_time": 3.0}
