"""One record from several ranks, and alarms."""

from __future__ import annotations

from tpf.journal import AT_LEAST, WINDOW, Alarms, Part, Sample, merge


def test_merged_record_has_the_samples_of_all_ranks_in_their_order() -> None:
    def sample(position: int, **terms: float) -> Sample:
        events = ["moved"] if position == 3 else []
        return Sample(position, f"e{position}", 10 * position, float(position), terms, events)

    slow = Part([sample(1, loss=1.0), sample(3, loss=3.0)], {"step": 2e3, "data": 5.0}, [], 7.0)
    fast = Part([sample(0, loss=4.0, plddt=2.0), sample(2, loss=0.0)], {"step": 1e3}, [], 8.0)
    record = merge([slow, fast])
    assert record["samples"] == ["e0", "e1", "e2", "e3"]
    assert record["loss"] == 2.0 and record["plddt"] == 2.0
    assert record["grad_norm"] == 3.0 and record["events"] == ["e3: moved"]
    assert record["step_ms"] == 2e3 and record["data_ms"] == 5.0
    assert record["tokens_per_s"] == 30.0 and record["max_mem_gb"] == 8.0


def test_alarm_for_a_spike_and_silence_for_a_trend() -> None:
    alarms = Alarms()
    for step in range(3 * WINDOW):
        assert not alarms.hear({"loss": 4.0 * 0.99**step + 0.1 * (step % 3), "grad_norm": 1.0})
    (said,) = alarms.hear({"loss": 9.0, "grad_norm": 1.0})
    assert said.startswith("loss 9 is far above the median")
    assert not alarms.hear({"loss": None, "grad_norm": float("nan")})


def test_alarms_wait_for_enough_steps_and_take_up_a_log() -> None:
    log = [{"loss": 1.0}] * AT_LEAST
    assert not Alarms(log[1:]).hear({"loss": 50.0})
    assert Alarms(log).hear({"loss": 50.0}) == [
        f"loss 50 is far above the median 1 of the last {AT_LEAST} steps"
    ]
