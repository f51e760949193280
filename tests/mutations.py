"""Mutation testing: lines of src that guarantees rest on, each made wrong in a copy, and tests that must fail then.

    python tests/mutations.py              # all of them; some minutes on two cores
    python tests/mutations.py fsync seal   # those whose name has one of these words
    python tests/mutations.py --list

A mutation that no test notices has lived, and the status is 1. A text is looked for in all of src, wherever it has
been moved to, and must be found just once: ``tests/test_mutations.py`` says which mutation has lost its line.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
SECONDS = 300  # that the tests of one mutation may take; one that makes them hang is noticed, too
FAILED, PASSED = 1, 0  # pytest's exit statuses; others mean that no test has said anything


class Mutation(NamedTuple):
    """name: what goes wrong. text: stands once in src, and becomes ``instead``. tests: below tests/, at least one of
    which must fail."""

    name: str
    text: str
    instead: str
    tests: tuple[str, ...]


LEFT = "torch/test_loops.py::test_a_loop_that_was_left_between_rounds_goes_on_with_the_next_epoch"
EXACT = "torch/gradients/test_exact.py::test_parameters_equal_those_of_one_process"
COUNTS = "torch/gradients/test_counts.py::test_means_over_tokens_are_those_of_one_process"
REFUSED = "torch/gradients/test_steps.py::test_a_step_that_is_not_due_is_refused"
MISUSE = "torch/measuring/test_meter.py::test_misuse_is_answered_in_a_sentence"
STRANGERS = "torch/elastic/test_gateway.py::"
EQUATIONS = "papers/test_equations.py::"

MUTATIONS = (
    # -- weights: what a loss or a gradient counts in the round's
    Mutation(
        "weights: a rank's loss counts as under equal parts",
        "return self._averaged * part / piece.plan.batch",
        "return self._averaged * part / piece.plan.batch * (1.01 if piece.samples > 3 else 1.0)",
        (LEFT,),
    ),
    Mutation(
        "weights: DDP's division by the ranks is forgotten",
        "self._averaged = 1 if exact else self._ranks",
        "self._averaged = 1",
        (LEFT,),
    ),
    Mutation(
        "weights: the hook's share is that of the planned round",
        "return self._weighed / piece.batch",
        "return self._weighed / (piece.batch + 1)",
        ("torch/gradients/test_not_zeroed.py::test_nor_under_the_hook", EXACT),
    ),
    Mutation(
        "weights: gathered pieces keep the scale of another one",
        "scale = before / many if many and not piece.first else 1.0",
        "scale = 1.0",
        (EXACT,),
    ),
    Mutation(
        "weights: what was counted is not made up for",
        "return batch / counted if counted else 0.0",
        "return 1.0",
        (COUNTS,),
    ),
    Mutation(
        "weights: samples that only keep batch norm fed are counted",
        "count = many = count * (many > 0)",
        "many = count",
        (COUNTS,),
    ),
    Mutation(
        "weights: a loss that is a sum is taken for a mean",
        "part = float(many > 0)",
        "part = many",
        (COUNTS,),
    ),
    Mutation(
        "weights: the mean loss on record is over samples where tokens were counted",
        "many = np.where(counted.any(0), np.where(counted, counts, 0.0).sum(0), batches)",
        "many = np.where(counted.any(0), batches, batches)",
        ("torch/measuring/test_meter.py::test_the_mean_losses_are_exact_sums_over_what_was_counted",),
    ),
    # -- the loop's steps
    Mutation(
        "steps: each rank may have a learning rate of its own",
        "self._meter.rate, self._meter.described = self._steps.rate, self._steps.described",
        "self._meter.described = self._steps.described",
        (
            "torch/test_silent_mistakes.py::"
            "test_learning_rates_that_go_by_a_ranks_own_samples_are_told_on_all_ranks",
        ),
    ),
    Mutation(
        "steps: one rank alone may leave one out",
        "self._meter.left_out += 1",
        "pass",
        (MISUSE,),
    ),
    Mutation(
        "steps: gradients that DDP sums over no other rank are stepped with",
        "if not self._prepared.now:",
        "if False:",
        (MISUSE,),
    ),
    Mutation(
        "steps: a rank that joins may have another optimizer state",
        "if not any(thing is one for one in self._given.registered):",
        "if False:",
        ("torch/test_launcher.py::test_a_script_goes_on_without_its_workers",),
    ),
    Mutation(
        "steps: gradients of the round before are counted again",
        "if any(grad is not None and bool(grad.any()) for grad in left):",
        "if False:",
        ("torch/gradients/test_not_zeroed.py::test_what_a_step_has_used_is_not_counted_again",),
    ),
    Mutation(
        "steps: gradients that were zeroed before the step are stepped with",
        "if not any(id(p) in had for p in held(optimizer)):",
        "if True:",
        (REFUSED,),
    ),
    Mutation(
        "steps: two steps for one round",
        "if self.taken and any(one in self.taken for one in optimizers):",
        "if False:",
        (REFUSED,),
    ),
    Mutation(
        "steps: a step before the round is complete",
        "if micro_step is None or micro_step.complete:",
        "if True:",
        (REFUSED,),
    ),
    Mutation(
        "steps: a loss that is no number raises nothing",
        "for on_nan in self._on_nan:",
        "for on_nan in ():",
        ("torch/test_silent_mistakes.py::test_what_to_do_about_a_loss_that_is_no_number",),
    ),
    Mutation(
        "steps: one of the finished pieces' gradients is lost",
        "self._kept = [p.grad for p in self._parameters]",
        "self._kept = [None, *(p.grad for p in self._parameters[1:])]",
        (EXACT,),
    ),
    # -- claims: each sample of a round is run once
    Mutation(
        "claims: the lock is not taken",
        "return fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)",
        "return None",
        ("torch/test_peers.py::test_each_sample_is_claimed_once_whatever_the_ranks_share",),
    ),
    Mutation(
        "claims: what others have claimed meanwhile is not counted",
        "return Count(claimed - samples, others",
        "return Count(0 * claimed, others",
        ("torch/test_claims.py::test_three_numbers_travel_in_one",),
    ),
    Mutation(
        "claims: the last claim goes beyond the pool",
        "size = min(wanted, division.pool - start)",
        "size = wanted",
        ("torch/test_each_sample.py::test_a_claim_ends_with_the_pool_whatever_was_claimed_meanwhile",),
    ),
    Mutation(
        "claims: what is kept for the end leaves a broken unit in the pool",
        "kept = kept + (loads - kept - first) % unit",
        "kept = kept + 0",
        ("torch/test_each_sample.py::test_a_pool_holds_whole_units_of_every_load",),
    ),
    Mutation(
        "claims: samples that were never run are not missed",
        "if (ran := int(loads.sum())) != batch:",
        "if False and (ran := int(loads.sum())):",
        ("torch/test_each_sample.py::test_what_the_ranks_ran_is_all_of_the_round_or_it_is_told",),
    ),
    # -- plans: the same on all ranks, and in force from the round that was said
    Mutation(
        "plans: a round too early",
        "self._holds(step + 1 + self.lag, self._newest)",
        "self._holds(step + self.lag, self._newest)",
        ("test_balancer.py::test_a_plan_takes_effect_one_round_and_the_lag_later",),
    ),
    Mutation(
        "plans: what was trained in the background is forgotten",
        "self._state, failed = self._trained()",
        "failed = self._trained()[1]",
        ("test_balancer.py::test_plans_are_those_of_step_and_training_in_turns",),
    ),
    Mutation(
        "plans: batch norm gets one sample",
        "return shares.at_least(loads, self._floor)",
        "return loads",
        ("test_balancer.py::test_quanta_and_floors",),
    ),
    Mutation(
        "plans: shares that divide nothing are taken",
        "if not (abs(together - 1.0) <= 1e-6 and least >= 0):",
        "if False:",
        ("serve/test_faults.py::test_a_policy_that_fails_harms_nobody",),
    ),
    Mutation(
        "plans: ranks that were given other options are not told",
        "if theirs[name] != value:",
        "if False:",
        ("torch/gradients/test_same_bits.py::test_ranks_that_compute_in_unlike_ways_are_refused",),
    ),
    Mutation(
        "plans: a first round that warms up teaches overheads",
        "self._fit, self._warm = fit if self._warm else self._fit, True",
        "self._fit, self._warm = fit, True",
        ("test_balancer.py::test_a_first_round_that_is_seen_again_teaches_no_overheads_either",),
    ),
    # -- measuring: what a rank waits for others is not its own
    Mutation(
        "waits: the time in a collective is the rank's own",
        "_waited += time.perf_counter() - began",
        "_waited += 0.0",
        ("torch/test_waits.py::test_the_doctor_finds_the_slow_rank_wherever_the_loop_waits",),
    ),
    Mutation(
        "waits: a collective within unlike micro-steps is let through",
        "if name == BUFFERS or (step := running()) is None or (where := caller()) is None:",
        "if True:",
        (
            "torch/test_waits.py::test_a_collective_within_rounds_of_unlike_turns_is_refused_and_does_not_hang",
        ),
    ),
    # -- epochs: every sample once
    Mutation(
        "epochs: all have the same order",
        "return np.random.default_rng((self.seed, epoch)).permutation(self.samples)",
        "return np.random.default_rng(self.seed).permutation(self.samples)",
        ("torch/test_each_sample.py::test_each_epoch_has_an_order_of_its_own_that_can_be_had_again",),
    ),
    Mutation(
        "epochs: a rank's samples begin at another place",
        "start += sum(own[:rank].tolist())",
        "start += sum(own[: max(rank - 1, 0)].tolist())",
        ("torch/feed/test_epochs.py::test_each_sample_once_an_epoch",),
    ),
    Mutation(
        "epochs: a last sample that batch norm cannot take becomes a round",
        "return full + (rest > 0 if not full else rest >= floor)",
        "return full + (rest > 0)",
        ("torch/feed/test_epochs.py::test_each_sample_once_an_epoch",),
    ),
    Mutation(
        "epochs: one that was left is gone on with",
        "if self.samples_done and not self._midway:  # the last iteration was left early",
        "if False:",
        ("torch/feed/test_leaving.py::test_after_a_loop_that_was_left_the_next_begins_a_fresh_round",),
    ),
    Mutation(
        "epochs: a checkpoint of another global batch is gone on with",
        'if state["global_batch"] != self._batch:',
        "if False:",
        ("torch/test_states.py::test_states_of_pace_that_are_none",),
    ),
    Mutation(
        "epochs: a checkpoint of another version is gone on with",
        'if not _whole(state.get("version")) or state["version"] != VERSION:',
        "if False:",
        ("torch/test_states.py::test_states_of_pace_that_are_none",),
    ),
    # -- digests
    Mutation(
        "digest: a line of the record that was moved is not noticed",
        'return f"{zlib.crc32(body, int(before, 16) if before else 0):08x}"',
        'return f"{zlib.crc32(body):08x}"',
        ("runs/test_damage.py::test_a_mutilated_record_is_refused_or_is_a_run_that_was_killed",),
    ),
    Mutation(
        "digest: a line of the record that was changed is not noticed",
        'if _sum(text[: found.start()], "" if before is None else before["sum"]) != found[1].decode():',
        "if False:",
        ("runs/test_damage.py::test_a_mutilated_record_is_refused_or_is_a_run_that_was_killed",),
    ),
    Mutation(
        "digest: a checkpoint with flipped bytes is trained on",
        "return end == MARK + _digest(body)",
        "return True",
        ("train/test_checkpoint.py::test_eight_flipped_bytes_are_found_wherever_they_are",),
    ),
    Mutation(
        "digest: a damaged checkpoint takes the place of the older one",
        "if self._keeps and self.newest.exists():",
        "if self.newest.exists():",
        ("train/test_checkpoint.py::test_a_damaged_one_never_takes_the_place_of_the_older",),
    ),
    Mutation(
        "digest: a service's job with damaged settings goes on",
        "if digest != _digest(name, settings, rules, state, through):",
        "if False:",
        ("serve/test_stores.py::test_a_job_that_cannot_go_on_is_set_aside",),
    ),
    Mutation(
        "digest: a service's damaged call is carried out again",
        "if its_digest != _digest(name, number, call):",
        "if False:",
        ("serve/test_stores.py::test_a_job_that_cannot_go_on_is_set_aside",),
    ),
    Mutation(
        "digest: a call that is missing in a service's log is passed over",
        "if number != expected:",
        "if False:",
        ("serve/test_stores.py::test_a_job_that_cannot_go_on_is_set_aside",),
    ),
    # -- fsync
    Mutation(
        "fsync: a file that is written whole",
        "os.fsync(file.fileno())",
        "pass",
        ("test_power.py",),
    ),
    Mutation(
        "fsync: the record before its summary",
        "self.sync()  # a summary must not outlive its rounds",
        "pass",
        ("test_power.py",),
    ),
    Mutation(
        "fsync: the record at its end",
        "with self._file:\n                self.sync()",
        "self._file.close()",
        ("test_power.py",),
    ),
    Mutation(
        "fsync: a service's commits under --sync",
        "pragma synchronous={'full' if sync else 'normal'}",
        "pragma synchronous=normal",
        ("serve/test_forced.py",),
    ),
    Mutation(
        "fsync: a lost -wal is not noticed",
        'if one("select open from held") == MORE and not logged:',
        "if False:",
        ("serve/test_stores.py",),
    ),
    Mutation(
        "fsync: half a line stays after a full disk",
        "os.ftruncate(self._file.fileno(), start)",
        "pass",
        ("runs/test_record.py::test_a_full_disk_leaves_no_half_line",),
    ),
    # -- seals and tokens
    Mutation(
        "seal: what a stranger wrote into the store is read",
        "if not hmac.compare_digest(tag, self.proof(key, text).hex().encode()):",
        "if False:",
        (STRANGERS + "test_what_a_stranger_writes_into_the_store_is_refused",),
    ),
    Mutation(
        "seal: one of another key is good, too",
        'key.encode() + b"\\0" + text, "sha256")',
        'text, "sha256")',
        (STRANGERS + "test_what_a_stranger_writes_into_the_store_is_refused",),
    ),
    Mutation(
        "seal: whoever answers in a member's place is a member",
        'if bytes(row.tolist()) != seal.proof(f"{key}/{of}/{index}"):',
        "if False:",
        (STRANGERS + "test_who_answers_in_the_place_of_a_member_must_be_of_the_run",),
    ),
    Mutation(
        "seal: what is handed over may run code",
        "return torch.load(io.BytesIO(raw), weights_only=True)",
        "return torch.load(io.BytesIO(raw), weights_only=False)",
        (STRANGERS + "test_nothing_that_is_read_is_run",),
    ),
    Mutation(
        "seal: a checkpoint may run code",
        "parts = torch.load(io.BytesIO(content), weights_only=True)",
        "parts = torch.load(io.BytesIO(content), weights_only=False)",
        ("train/test_strange_checkpoint.py",),
    ),
    Mutation(
        "token: a launcher lets in whoever knocks",
        'known = hmac.compare_digest(proof, _proof(self._token, b"joins", mine, theirs))',
        "known = True",
        (STRANGERS + "test_a_stranger_at_the_door_is_turned_away",),
    ),
    Mutation(
        "token: a launcher joins whoever answers",
        'if not hmac.compare_digest(proof, _proof(self._token, b"keeps", theirs, mine, run)):',
        "if False:",
        (STRANGERS + "test_a_first_machine_that_is_a_stranger_is_told",),
    ),
    Mutation(
        "token: any header is good enough for the service",
        'if scheme.lower() == b"bearer" and tokens.matches(given.strip().decode("latin-1"), self.token):',
        'if scheme.lower() == b"bearer":',
        ("serve/test_api.py::test_tokens_and_secrets",),
    ),
    Mutation(
        "token: any address is good enough for the service's pages",
        'if page and tokens.matches(query.pop("token", [""])[0], self.token):',
        "if page:",
        ("serve/test_api.py::test_tokens_and_secrets",),
    ),
    Mutation(
        "token: one worker speaks for another",
        "if not tokens.matches(secret, member.secret):",
        "if False:",
        ("serve/test_jobs.py::test_strangers_and_namesakes", "serve/test_api.py::test_tokens_and_secrets"),
    ),
    Mutation(
        "token: everybody may read it",
        "os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)",
        "os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)",
        ("serve/test_process.py::test_a_token_is_made_and_kept",),
    ),
    # -- who asks
    Mutation(
        "host: a page elsewhere reaches a service without a token",
        'if name.lower() not in (b"localhost", b"127.0.0.1", b"[::1]"):',
        "if False:",
        ("serve/test_api.py::test_nobody_needs_a_token_where_there_is_none",),
    ),
    Mutation(
        "host: a page elsewhere reaches the live page",
        "page = TrustedHostMiddleware(page, allowed_hosts=[*LOCAL, ",
        'page = TrustedHostMiddleware(page, allowed_hosts=["*", ',
        ("cli/test_watch.py::test_it_prints_where_the_page_is_and_ends_when_told",),
    ),
    Mutation(
        "host: the whole network is let in without a token",
        "if no_token and host not in LOCAL:",
        "if False:",
        ("serve/test_process.py::test_mistakes_at_the_start",),
    ),
    Mutation(
        "host: a page elsewhere posts without asking first",
        "if body and kind != JSON:",
        "if False:",
        ("serve/test_api.py",),
    ),
    Mutation(
        "host: a body has no end",
        "if left < 0:\n        raise _Refused(413",
        "if False:\n        raise _Refused(413",
        ("serve/test_process.py::test_large_bodies_and_slow_clients", "serve/test_api.py"),
    ),
    # -- sums over the members of a run that may lose ranks
    Mutation(
        "members: a sample that is missing or counts twice is not noticed",
        "if have[0] != size or any(",
        "if False and any(",
        ("torch/elastic/test_member.py::test_a_sample_that_counts_twice_ends_the_run",),
    ),
    Mutation(
        "members: a sample that was run twice hides one that was not",
        "at = max(at, start + count)",
        "at = at + count",
        ("torch/elastic/test_member.py::test_what_nobody_has_run",),
    ),
    Mutation(
        "members: a gradient that somebody kept is written over",
        "return over(self.work) and bool(_use_count) and self._holders() <= self._own",
        "return True",
        ("torch/elastic/test_member.py::test_a_gradient_stays_what_it_was",),
    ),
    Mutation(
        "members: sums without rounding overflow",
        "lower -= carried << FINE_BITS",
        "lower -= 0 * carried",
        (
            "torch/test_claims.py::test_a_sum_does_not_depend_on_its_order",
            "torch/gradients/test_same_bits.py",
        ),
    ),
    Mutation(
        "members: the model begins anew where all who had it are lost",
        'if self._link.posted("begun"):',
        "if False:",
        ("torch/elastic/test_member.py::test_nobody_is_left_who_has_the_model",),
    ),
    # -- who is missed, and what a service takes
    Mutation(
        "service: a report of more samples than were planned is taken",
        "if samples > planned:",
        "if False:",
        ("serve/test_jobs.py::test_more_samples_than_planned_are_refused",),
    ),
    Mutation(
        "service: a report that comes twice counts twice",
        "if report == member.last:",
        "if False:",
        ("serve/test_jobs.py::test_a_repeated_report_changes_nothing",),
    ),
    Mutation(
        "service: what was not stored has happened",
        "batch, self._waiting = batch + self._waiting, []",
        "[_carry_out(entry) for entry in batch]\n        batch, self._waiting = batch + self._waiting, []",
        ("serve/test_faults.py",),
    ),
    Mutation(
        "service: a job stays as it was in memory when its log could not be written",
        "if runtime.logged != runtime.done:",
        "if False:",
        ("serve/test_faults.py",),
    ),
    # -- papers: each row of docs/equations.md has a test that notices a change of its formula
    Mutation(
        "papers: of equal stragglers the last one gives",
        "    straggler = np.argmax(seconds, axis=-1, keepdims=True)\n",
        "    straggler = seconds.shape[-1] - 1 - np.argmax(seconds[..., ::-1], axis=-1, keepdims=True)\n",
        (EQUATIONS + "test_dolbie_ties_go_to_the_first_of_the_list",),
    ),
    Mutation(
        "papers: of equal stragglers the last one gives, without a master",
        "key=lambda a: (-a.seconds, a.sender)",
        "key=lambda a: (-a.seconds, -a.sender)",
        (EQUATIONS + "test_dolbie_ties_go_to_the_first_of_the_list",),
    ),
    Mutation(
        "papers: peers begin with a step that is not safe",
        "alpha = safe if alpha is None else min(alpha, safe)",
        "alpha = safe if alpha is None else alpha",
        (EQUATIONS + "test_dolbie_without_a_master",),
    ),
    Mutation(
        "papers: DOLBIE begins with a step that is not safe",
        "return safe if self.alpha is None else min(self.alpha, safe)",
        "return safe if self.alpha is None else self.alpha",
        (EQUATIONS + "test_dolbie_first_step_size_is_that_of_the_smallest_share",),
    ),
    Mutation(
        "papers: the bound leaves out how far the optimum moves",
        "(1 + outcome.path) / played",
        "1 / played",
        (EQUATIONS + "test_dolbie_theorem_1_with_its_constants_put_right",),
    ),
    Mutation(
        "papers: the bound has a larger constant",
        "rounds * min((workers - 1) / 4, 1.0)",
        "rounds * 1.0",
        (EQUATIONS + "test_dolbie_theorem_1_with_its_constants_put_right",),
    ),
    Mutation(
        "papers: rounds of equal times do not break a row",
        "streak = np.where(precedes, state.streak + 1, 0)",
        "streak = state.streak + precedes",
        (EQUATIONS + "test_dolbie_lbbsp_counts_rounds_in_a_row",),
    ),
    Mutation(
        "papers: LB-BSP rounds by shares alone",
        "return Plan(loads / batch, costs=costs), PredictiveState",
        "return Plan(loads / batch), PredictiveState",
        (EQUATIONS + "test_lbbsp_gpus_get_whole_samples_that_end_soonest",),
    ),
    Mutation(
        "papers: a GPU may get less than the knee",
        "return np.minimum(np.maximum(least, self.knee), most), most",
        "return least, most",
        (EQUATIONS + "test_lbbsp_gpus_run_at_least_the_knee",),
    ),
    Mutation(
        "papers: NARX predicts too early",
        "warmup: int = 500",
        "warmup: int = 400",
        ("forecast/test_learned.py::test_narx_predicts_after_500_rounds_by_default",),
    ),
    Mutation(
        "papers: training stops at larger gains",
        "CALM = 1e-4, 4",
        "CALM = 1e-3, 4",
        ("forecast/test_learned.py::test_training_stops_after_four_small_gains_in_a_row",),
    ),
    Mutation(
        "papers: training stops after small gains that are not in a row",
        "np.where(gained < CALM[0], calm[active] + 1, 0)",
        "calm[active] + (gained < CALM[0])",
        ("forecast/test_learned.py::test_training_stops_after_four_small_gains_in_a_row",),
    ),
    Mutation(
        "papers: ARIMA forgets its last error",
        " + state.ma * state.error",
        "",
        (EQUATIONS + "test_lbbsp_arima_predicts_by_its_difference_equation",),
    ),
    Mutation(
        "papers: recurrent networks read the newest speed first",
        "for lag in range(self.look, 0, -1)]",
        "for lag in range(1, self.look + 1)]",
        (EQUATIONS + "test_lbbsp_recurrent_networks_read_two_speeds_oldest_first",),
    ),
    Mutation(
        "papers: recurrent networks look back further",
        "    look: int = 2\n",
        "    look: int = 3\n",
        (EQUATIONS + "test_lbbsp_recurrent_networks_read_two_speeds_oldest_first",),
    ),
    Mutation(
        "papers: training converges by the mean of ten losses",
        "max(losses[-ITERATIONS:]) < target",
        "sum(losses[-ITERATIONS:]) / ITERATIONS < target",
        ("papers/test_lbbsp_clusters.py::test_training_converges_with_ten_losses_in_a_row_below_the_target",),
    ),
    Mutation(
        "papers: NARX reads the resources of the round before",
        "lags = range(3 if self.inputs == 8 else 2)",
        "lags = range(1, 4 if self.inputs == 8 else 3)",
        (EQUATIONS + "test_lbbsp_narx_predicts_from_two_speeds_and_the_resources_of_the_round",),
    ),
    Mutation(
        "papers: NARX reads another past speed",
        "[(1, SPEED), (2, SPEED), *",
        "[(1, SPEED), (3, SPEED), *",
        (EQUATIONS + "test_lbbsp_narx_predicts_from_two_speeds_and_the_resources_of_the_round",),
    ),
    Mutation(
        "papers: WLBS adjusts within theta",
        "uneven = t_j - t_i > self.theta * _mean(seconds)",
        "uneven = t_j > t_i",
        (EQUATIONS + "test_wlbs_the_quickest_relieves_the_slowest_until_their_times_are_near",),
    ),
    Mutation(
        "papers: a worker joins SSP at the fastest clock",
        "replaced(state.clocks, worker, min(others, default=0))",
        "replaced(state.clocks, worker, max(others, default=0))",
        ("sync/test_gates.py::test_ssp_worker_that_joins_has_the_clock_of_the_slowest",),
    ),
    Mutation(
        "papers: OGD takes the secant of a known cost",
        "if round.costs is None else derivative(round.costs, round.loads)",
        "",
        (EQUATIONS + "test_dolbie_ogd_steps_down_the_subgradient_and_projects",),
    ),
    Mutation(
        "papers: a flat cost has the mean slope",
        "if flat.any():",
        "if False:",
        ("balance/test_dolbie.py::test_worker_whose_load_takes_only_its_overhead_could_take_everything",),
    ),
    Mutation(
        "papers: the given first partition is ignored",
        "weights = _weights(self.start, cluster.workers) if self.start else",
        "weights =",
        (EQUATIONS + "test_dolbie_starts_from_any_partition",),
    ),
    Mutation(
        "papers: DBW's step is larger by the rate",
        "axpy(self.values, step, -rate)",
        "axpy(self.values, step, -rate * (1 + rate))",
        ("simulate/test_server.py::test_everyone_is_the_same_as_one_process",),
    ),
    Mutation(
        "papers: DBW's variance is that of k gradients, not k - 1",
        "variance = spread * count / (count - 1)",
        "variance = spread",
        (EQUATIONS + "test_dbw_estimates_of_variance_and_norm",),
    ),
    Mutation(
        "papers: DBW's squared norm may be negative",
        "norm2 = max(happened.norm2 - spread, 0.0)",
        "norm2 = happened.norm2 - spread",
        (EQUATIONS + "test_dbw_estimates_of_variance_and_norm",),
    ),
    Mutation(
        "papers: DBW's last estimate is lost",
        "return 2 if np.isnan(state.variance[1:]).all() else 1",
        "return 1",
        ("backup/test_policies.py::test_dbw_waits_for_two_before_the_last_estimate_is_lost",),
    ),
    Mutation(
        "papers: DBW's smoothness has the rate of the next update",
        "smoothness = 2.0 * (state.rate * before",
        "smoothness = 2.0 * (happened.rate * before",
        ("backup/test_policies.py::test_smoothness_is_found_with_the_rate_of_its_own_update",),
    ),
    Mutation(
        "papers: DBW's gain has the same rate for each k",
        "happened.rates[:n]",
        "happened.rates[-1]",
        ("backup/test_policies.py::test_each_number_of_gradients_promises_the_gain_of_its_own_rate",),
    ),
    Mutation(
        "papers: DBW takes the smallest of equally good numbers",
        "(1 - TIE)][-1])",
        "(1 - TIE)][0])",
        ("backup/test_policies.py::test_dbw_takes_the_largest_of_equally_good_numbers",),
    ),
    Mutation(
        "papers: DBW waits for all after a rise at k = n",
        "if rose and happened.quorum < n:",
        "if rose:",
        (EQUATIONS + "test_dbw_chooses_the_most_gain_a_second_and_never_less_while_the_loss_rises",),
    ),
    Mutation(
        "papers: DBW takes any rise for a rise",
        "beta: float = 1.01",
        "beta: float = 1.0",
        (EQUATIONS + "test_dbw_chooses_the_most_gain_a_second_and_never_less_while_the_loss_rises",),
    ),
    Mutation(
        "papers: B-DBW takes the shortest update",
        "rate: float | Array) -> Array:\n        return k\n",
        "rate: float | Array) -> Array:\n        return np.ones_like(k)\n",
        ("backup/test_policies.py::test_blind_takes_the_most_gradients_per_second",),
    ),
    Mutation(
        "papers: AdaSync takes a loss below 0 as any other",
        "if not (first_loss > 0 and loss > 0) or first == n:",
        "if first == n:",
        ("backup/test_policies.py::test_adasync_waits_for_all_where_the_loss_is_not_positive",),
    ),
    Mutation(
        "papers: K-async AdaSync has no root",
        "first / math.sqrt(part)",
        "first / part",
        ("backup/test_policies.py::test_adasync_window_and_async",),
    ),
    Mutation(
        "papers: exact values of Fig. 1 after half a step",
        "after = _loss(learns, values - np.float32(rate) * mean",
        "after = _loss(learns, values - np.float32(rate / 2) * mean",
        ("papers/test_dbw.py::test_estimates_are_compared_with_the_exact_values",),
    ),
    Mutation(
        "papers: DBW is compared with the slowest static k",
        "return min((name for name in times",
        "return max((name for name in times",
        ("papers/test_dbw.py::test_fig6_compares_with_the_best_static_number",),
    ),
    Mutation(
        "papers: a time to a loss is that of one update's loss",
        "start = np.maximum(end - SMOOTHED, 0)",
        "start = end - 1",
        ("papers/test_dbw.py::test_fig4_has_the_seconds_and_the_numbers_of_gradients",),
    ),
    Mutation(
        "papers: Fig. 10 has the time of the last update",
        "times[name] = [reached(updates, target) for",
        "times[name] = [updates[-1].ended for",
        ("papers/test_dbw.py::test_fig10_has_the_seconds_of_each_rule",),
    ),
    Mutation(
        "papers: the greedy assignment explores nothing",
        "owner[removed] = favourite[removed]",
        "owner[removed] = owner[removed]",
        (
            "papers/test_coded.py::test_exploration_takes_out_some_workers_and_puts_them_back_at_their_best_master",
        ),
    ),
    Mutation(
        "papers: Algorithm 3's steps do not shrink",
        "gamma *= 1 - alpha * gamma",
        "gamma *= 1",
        ("papers/test_coded.py::test_fig4_has_the_steps_of_each_ratio_and_where_they_pass_the_greedy",),
    ),
)


def sources() -> dict[Path, str]:
    """The files of src, by their path below it."""
    return {path.relative_to(SOURCE): path.read_text() for path in sorted(SOURCE.rglob("*.py"))}


def place(mutation: Mutation, files: dict[Path, str]) -> Path:
    """The file in which its text stands. Raises LookupError, a sentence, where that is not just one place."""
    found = [path for path, content in files.items() for _ in range(content.count(mutation.text))]
    if len(found) != 1:
        where = ", ".join(map(str, found)) or "none"
        raise LookupError(
            f"mutation '{mutation.name}': its text stands in {len(found)} places ({where}), expected one: give it "
            f"the line as it is now, or leave it out if the guarantee is gone: {mutation.text}"
        )
    return found[0]


def mutated(mutation: Mutation, files: dict[Path, str]) -> tuple[Path, str]:
    """The file, and what it holds with the mutation."""
    path = place(mutation, files)
    return path, files[path].replace(mutation.text, mutation.instead)


def run(tests: tuple[str, ...], source: Path, seconds: float = SECONDS) -> tuple[int | None, str]:
    """pytest's exit status with Paceline from ``source``, None where it took too long; the end of what it said."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(source), "CI": "true", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [*command, *(f"tests/{test}" for test in tests)],
            cwd=ROOT, env=environment, stdout=said, stderr=said, start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = None
            process.wait()
        said.seek(0)
        return status, said.read().decode(errors="replace")[-3000:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("words", nargs="*", help="only mutations whose name has one of these")
    parser.add_argument("--list", action="store_true", help="print their names, and run nothing")
    options = parser.parse_args()
    files = sources()
    chosen = [m for m in MUTATIONS if not options.words or any(word in m.name for word in options.words)]
    if not chosen:
        print("mutations: none has one of these words in its name; --list prints them", file=sys.stderr)
        return 2
    try:
        places = [mutated(mutation, files) for mutation in chosen]
    except LookupError as error:
        print(error, file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(mutation.name for mutation in chosen))
        return 0
    # Sorted: pytest finds no fixtures of a folder that it comes to for the second time.
    every = tuple(sorted({test for mutation in chosen for test in mutation.tests}))
    status, said = run(every, SOURCE, 12 * SECONDS)
    if status != PASSED:
        print(f"{said}\nmutations: the tests fail as it is; see to them first", file=sys.stderr)
        return 2
    lived, unknown = [], []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "src"
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        for mutation, (path, content) in zip(chosen, places, strict=True):
            (copy / path).write_text(content)
            began = time.monotonic()
            status, said = run(mutation.tests, copy)
            (copy / path).write_text(files[path])
            verdict = {FAILED: "killed", PASSED: "LIVED", None: "killed (hung)"}.get(status, "UNKNOWN")
            lived += [mutation] if status == PASSED else []
            if verdict == "UNKNOWN":
                unknown.append(mutation)
                print(said, file=sys.stderr)
            print(f"{verdict:14} {time.monotonic() - began:5.0f} s  {mutation.name}  ({path})", flush=True)
    print(f"{len(chosen) - len(lived) - len(unknown)} killed, {len(lived)} lived, {len(unknown)} unknown")
    return 1 if lived or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
