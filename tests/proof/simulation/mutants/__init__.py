"""Deliberate bugs: each breaks one promise by a small patch, and the simulation has to find it.

A mutant that survives means that the simulation cannot see that promise broken; the test of it fails. The patches are
in the modules of this package, by subject.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tests.proof.simulation.directed import DIRECTED
from tests.proof.simulation.families import FamilyName, family
from tests.proof.simulation.mutants import consumers, events, letters, messages, owners, poison, runaways

Patch = tuple[Any, str, Any]


@dataclass(frozen=True)
class Mutant:
    """One bug.

    ``promise`` is what it breaks, and ``found_as`` how the finding begins that says so: a pair that falls over, because
    a patch no longer fits the code, would pass for any. It must be found within ``seeds`` of the random scenarios, or,
    where it is named, by the scenario ``directed``.
    """

    promise: str
    found_as: str
    patches: Callable[[], Sequence[Patch]]
    seeds: int = 0
    directed: str = ""

    def findings_in(self, found: Iterable[str]) -> list[str]:
        """Return those that say that this promise is broken."""
        return [finding for finding in found if finding.startswith(self.found_as)]

    @contextmanager
    def applied(self) -> Generator[None]:
        """Break the pair for a while."""
        patches = self.patches()
        originals = [(owner, name, owner.__dict__[name]) for owner, name, _ in patches]
        for owner, name, replacement in patches:
            setattr(owner, name, replacement)
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)


MUTANTS: dict[str, Mutant] = {
    "advance-before-confirmation": Mutant(
        "I1: acked means confirmed", "advanced before stored", events.advance_before_confirmation, 20
    ),
    "confirm-before-commit": Mutant(
        "I1: confirmed means committed", "confirmed before stored", events.confirm_before_commit, 20
    ),
    "database-error-counts-as-stored": Mutant(
        "I1: an error is no commit", "confirmed before stored", events.database_error_counts_as_stored, 100
    ),
    "file-is-not-looked-at": Mutant(
        "I1: confirmed means in the file that is there",
        "confirmed before stored",
        events.file_is_not_looked_at,
        directed="file replaced",
    ),
    "confirmations-kept-across-incarnations": Mutant(
        "I6: a confirmation reaches no later incarnation",
        "confirmed to a stranger",
        runaways.confirmations_kept_across_incarnations,
        directed="late answer",
    ),
    "half-a-round-is-kept": Mutant(
        "I6: half a round is not answered",
        "confirmed to a stranger",
        runaways.half_a_round_is_kept,
        directed="half a round",
    ),
    "dedup-dropped": Mutant("I2: one message, one row", "stored twice", events.dedup_dropped, 50),
    "difference-is-ignored": Mutant(
        "I2: what a message gives is never lost without a trace",
        "difference forgotten",
        events.difference_is_ignored,
        50,
    ),
    "commit-past-a-failed-offset": Mutant(
        "I3: no commit passes a failure", "commit past a failed message", events.commit_past_a_failed_offset, 20
    ),
    "window-closed-too-late": Mutant(
        "streams: asking for the next is moving past", "stuck", events.window_closed_too_late, 20
    ),
    "timeout-a-moment-late": Mutant(
        "streams: at the ack timeout", "timed out late", events.timeout_a_moment_late, directed="timeout"
    ),
    "overflow-leaves-entries-pending": Mutant(
        "streams: overflow fails all", "stuck", events.overflow_leaves_entries_pending, directed="overflow"
    ),
    "eviction-after-an-await": Mutant(
        "I5: no key of a dead poll", "failed without a cause", events.eviction_after_an_await, directed="dying stream"
    ),
    "unsubscribe-bypasses-the-gate": Mutant(
        "I1: leaving waits, too", "advanced before stored", events.unsubscribe_bypasses_the_gate, 200
    ),
    "fencing-check-removed": Mutant(
        "I10: a lost lease writes nothing", "written without a lease", events.fencing_check_removed, 300
    ),
    "lease-ignored": Mutant(
        "I10: a lost lease advances nothing", "advanced without a lease", events.lease_ignored, directed="cut off"
    ),
    "no-timeout-after-the-end": Mutant(
        "a filter that hangs hears of the end",
        "the filter was cancelled",
        events.no_end_has_a_deadline,
        directed="hung at the end",
    ),
    "reject-waits-for-persistence": Mutant(
        "streams: a reject resolves at once", "rejected at", events.reject_waits_for_persistence, directed="reject"
    ),
    "lane-order-by-resolution": Mutant("I3: fan-out order", "out of lane order", events.lane_order_by_resolution, 50),
    "second-aclose": Mutant("streams: aclose once", "closed twice", events.second_aclose, 50),
    "events-dropped-on-bisect": Mutant(
        "I9: one bad event alone", "confirmed before stored", events.events_dropped_on_bisect, 200
    ),
    "cut-short-counts-as-done": Mutant("I13: cut short is not done", "lost", poison.cut_short_counts_as_done, 50),
    "no-rejoin-is-awaited": Mutant("a failure costs no event", "lost", poison.no_rejoin_is_awaited, 100),
    "drained-triggers-are-forgotten": Mutant(
        "a recycled runner costs no trigger", "stuck", owners.drained_triggers_are_forgotten, 400
    ),
    "signing-off-ends-the-triggers": Mutant(
        "a drain costs no trigger", "stuck", owners.signing_off_ends_the_triggers, 50
    ),
}

MUTANTS |= {
    "strike-not-stored": Mutant(
        "a message costs only the trigger that cannot take it",
        "stuck",
        poison.strike_not_stored,
        directed="poison",
    ),
    "strikes-of-repeated-reports": Mutant(
        "a failure is one strike",
        "passed over too early",
        poison.strikes_of_repeated_reports,
        directed="repeated failure",
    ),
    "no-brake": Mutant("a topic is not buried", "no brake", poison.no_brake, directed="brake"),
    "passed-over-without-a-letter": Mutant(
        "a message that is passed over is kept", "lost", poison.passed_over_without_a_letter, directed="letter"
    ),
    "letter-confirmed-before-it-is-stored": Mutant(
        "I1: a letter is stored before its message is forgotten",
        "lost",
        poison.letter_confirmed_before_it_is_stored,
        directed="letter",
    ),
    "passed-over-forgotten-at-respawn": Mutant(
        "a message is passed over for good",
        "forgotten",
        poison.passed_over_forgotten_at_respawn,
        directed="passed over again",
    ),
    "no-absent-subscriber-is-awaited": Mutant(
        "no held trigger is left behind", "lost", poison.no_absent_subscriber_is_awaited, directed="held"
    ),
    "passing-over-resets-nothing": Mutant(
        "a stream goes on without a message",
        "stands still",
        poison.passing_over_resets_nothing,
        directed="after poison",
    ),
    "claims-a-trigger-without-its-stream": Mutant(
        "I19: a trigger of a stream goes to its owner",
        "split stream",
        owners.claims_a_trigger_without_its_stream,
        directed="two supervisors",
    ),
    "owner-not-checked-at-a-description": Mutant(
        "I19: a trigger is started by the owner of its stream",
        "split stream",
        owners.owner_is_not_checked_at_a_description,
        directed="two supervisors",
    ),
    "takes-over-half-a-stream": Mutant(
        "I19: a stream moves as a whole", "taken in part", owners.takes_over_half_a_stream, directed="takeover"
    ),
    "change-is-not-awaited": Mutant("a change costs no event", "lost", owners.change_is_not_awaited, 0, "changed"),
    "change-is-forgotten": Mutant(
        "a change takes effect", "not started again", owners.change_is_read_and_forgotten, directed="changed"
    ),
    "no-quarantine": Mutant(
        "I18: a trigger harms only so often", "ends its runner", runaways.no_quarantine, directed="killer"
    ),
    "held-back-is-not-awaited": Mutant(
        "I18: no trigger held back is left behind",
        "broadcast without a trigger",
        runaways.held_back_is_not_awaited,
        directed="killer",
    ),
    "respawn-slows-down": Mutant(
        "I18: all others start again at once",
        "started late",
        runaways.respawn_slows_down_though_a_culprit_is_named,
        directed="killer",
    ),
    "old-box-is-believed": Mutant(
        "I18: only the record of a current run counts",
        "passed over too early",
        runaways.box_of_an_earlier_incarnation_is_believed,
        directed="old box",
    ),
    "search-waits-for-a-start": Mutant(
        "I18: no trigger held back is left behind", "stuck", runaways.search_waits_for_a_start, directed="search"
    ),
}

MUTANTS |= {
    "old-state-is-not-looked-at": Mutant(
        "I16: a letter is resolved once", "resolved twice", letters.old_state_is_not_looked_at, 50
    ),
    "redriven-is-discarded": Mutant(
        "I16: a letter is resolved once", "resolved twice", letters.redriven_is_discarded, 400
    ),
    "kind-and-end-are-lost": Mutant(
        "I16: a redriven event is what was refused",
        "redriven otherwise",
        letters.kind_and_end_are_lost,
        directed="end redriven",
    ),
    "edit-is-ignored": Mutant("I16: an edit takes effect", "redriven otherwise", letters.edit_is_ignored, 500),
    "what-is-stored-is-overwritten": Mutant(
        "I2: what is stored counts", "overwritten", letters.what_is_stored_is_overwritten, directed="stored meanwhile"
    ),
    "refused-again-after-its-redrive": Mutant(
        "I16: one event, one letter", "second letter", letters.refused_again_after_its_redrive, directed="refused again"
    ),
    "resolved-before-its-event-is-stored": Mutant(
        "I16: a letter is resolved with its event",
        "redriven without its event",
        letters.resolved_before_its_event_is_stored,
        300,
    ),
    "act-is-not-recorded": Mutant(
        "I16: each act has its record", "act without a record", letters.act_is_not_recorded, 50
    ),
    "redriven-to-a-removed-trigger": Mutant(
        "I16: readers see what is redriven",
        "redriven behind the readers",
        letters.redriven_to_a_removed_trigger,
        directed="name again",
    ),
}

MUTANTS |= {
    "place-before-the-rows": Mutant(
        "a batch and its place are one", "skipped", consumers.place_is_committed_before_the_rows, 50
    ),
    "place-after-the-rows": Mutant(
        "a batch and its place are one",
        "handed over twice",
        consumers.place_is_committed_after_the_rows,
        directed="consumer dies",
    ),
    "worker-remembers-its-place": Mutant(
        "workers of a consumer share its place", "handed over twice", consumers.worker_remembers_its_place, 100
    ),
    "failed-batch-is-moved-past": Mutant(
        "what fails is handed over again", "skipped", consumers.batch_is_moved_past_though_it_failed, 100
    ),
    "removed-trigger-is-left-at-once": Mutant(
        "readers see a trigger to its end",
        "skipped",
        consumers.removed_trigger_is_left_at_once,
        directed="consumed again",
    ),
    "passed-over-without-a-consumers-letter": Mutant(
        "what a consumer cannot take is kept", "skipped", consumers.bad_event_is_passed_over_without_a_letter, 200
    ),
    "set-aside-at-once": Mutant(
        "an event is tried as often as it may be", "set aside too early", consumers.event_is_set_aside_at_once, 200
    ),
    "failures-are-not-counted": Mutant(
        "a bad event does not stop a consumer",
        "tried again and again",
        consumers.failures_are_not_counted,
        200,
    ),
    "consumers-letter-stays-open": Mutant(
        "an event that was set aside is used once",
        "handed over twice",
        consumers.letter_stays_open_after_its_event_is_taken,
        directed="set aside",
    ),
    "cleaner-does-not-ask-letters-of-consumers": Mutant(
        "what is set aside is not cleaned away", "skipped", consumers.cleaner_does_not_ask_letters_of_consumers, 200
    ),
    "cleaner-does-not-ask-consumers": Mutant(
        "what is unread is not cleaned away", "skipped", consumers.cleaner_does_not_ask_consumers, 50
    ),
}

MUTANTS |= {
    "message-is-handled-when-it-is-given": Mutant(
        "I16: a message is redriven when its events are stored",
        "redriven without its events",
        messages.handled_when_it_is_given,
        300,
    ),
    "rejected-message-counts-as-handled": Mutant(
        "I16: what a filter rejects is not redriven",
        "redriven though it was rejected",
        messages.rejected_counts_as_handled,
        600,
    ),
    "failed-message-counts-as-handled": Mutant(
        "I16: what a filter fails on is not redriven",
        "redriven without its events",
        messages.failed_counts_as_handled,
        300,
    ),
    "failure-opens-no-letter": Mutant(
        "I16: a redrive ends", "redriving for ever", messages.failure_opens_no_letter, 600
    ),
    "message-is-given-to-one-run-only": Mutant(
        "I6: a death costs no redriven message", "redriving for ever", messages.given_to_one_run_only, 600
    ),
    "key-of-a-redriven-message-is-lost": Mutant(
        "I2: a redriven message is recognised", "bound to another message", messages.key_is_lost, 300
    ),
}

assert all(mutant.seeds or mutant.directed in DIRECTED for mutant in MUTANTS.values())


def find(mutant: Mutant, name: FamilyName = "pair", *, found_after: int | None = None) -> tuple[int, str] | None:
    """Break the pair and look: after how many seeds it was found, and by what; None where it survives.

    ``found_after`` is how many seeds it took before. The last of these is judged first, and all from 0 on only if it no
    longer finds the bug: a seed gives the same history whatever was judged before it.
    """
    from tests.proof.simulation import judging

    of = family(name)
    with mutant.applied():
        if mutant.directed:
            found = mutant.findings_in(of.directed[mutant.directed]())
            return (1, found[0]) if found else None
        seeds = range(mutant.seeds)
        known = seeds[found_after - 1 : found_after] if found_after else ()
        for seed in chain(known, seeds):
            found = mutant.findings_in(map(str, judging.judge(of.draw(seed))))
            if found:
                return seed + 1, found[0]
    return None
