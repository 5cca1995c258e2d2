"""The ledger against a naive model of the rules, and its transitions one by one."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, MultipleResults, RuleBasedStateMachine, consumes, invariant, multiple, rule

from headgate.streams.contract import AdvanceItem, AdvanceOutcome
from headgate.streams.ledger import Account, Ledger, SeqTable, Share, ShareState

BATCH_EVENTS_MAX = 3


def no_wake() -> None:
    """What a ledger calls where nobody waits for it."""


class Books:
    """A ledger with what it needs."""

    def __init__(self) -> None:
        self.seqs = SeqTable(on_empty=no_wake)
        self.ledger = Ledger(self.seqs, on_ready=no_wake)

    def add(self, payload: str, *accounts: Account, lane: str = "", deadline: float = 0.0) -> list[Share]:
        return self.ledger.add_event(payload, lane, None, deadline, accounts)

    def take(self) -> list[AdvanceItem]:
        return self.ledger.take_batch(100)


def test_an_event_is_never_advanced_before_every_derived_event_is_confirmed() -> None:
    books = Books()
    (share,) = books.add("a", books.ledger.join())
    books.ledger.hand_out(share)
    first, second = books.ledger.bind(share), books.ledger.bind(share)
    assert first is not None
    assert second is not None
    books.ledger.move_past(share)
    books.seqs.confirm([second])
    assert books.take() == []
    books.seqs.confirm([first])
    assert books.take() == [AdvanceItem("a", AdvanceOutcome(acked=1))]


def test_a_confirmation_before_the_subscriber_moved_past_does_not_resolve() -> None:
    books = Books()
    (share,) = books.add("a", books.ledger.join())
    books.ledger.hand_out(share)
    seq = books.ledger.bind(share)
    assert seq is not None
    books.seqs.confirm([seq])
    assert books.take() == []
    books.ledger.move_past(share)
    assert books.take() == [AdvanceItem("a", AdvanceOutcome(acked=1))]


def test_a_refused_event_resolves_as_rejected_with_its_last_confirmation() -> None:
    books = Books()
    (share,) = books.add("a", books.ledger.join())
    books.ledger.hand_out(share)
    stored, refused = books.ledger.bind(share), books.ledger.bind(share)
    assert stored is not None
    assert refused is not None
    books.ledger.move_past(share)
    books.seqs.confirm([refused], refused=True)
    assert books.take() == []
    books.seqs.confirm([stored])
    assert books.take() == [AdvanceItem("a", AdvanceOutcome(rejected=1))]


def test_late_and_unknown_confirmations_are_ignored() -> None:
    books = Books()
    account = books.ledger.join()
    (share,) = books.add("a", account)
    books.ledger.hand_out(share)
    seq = books.ledger.bind(share)
    assert seq is not None
    books.ledger.fail(account)
    books.seqs.confirm([seq, 999])
    assert books.take() == [AdvanceItem("a", AdvanceOutcome(failed=1))]
    assert len(books.seqs) == 0


def test_positions_go_on_after_the_share_is_resolved_but_seqs_do_not() -> None:
    books = Books()
    account = books.ledger.join()
    (share,) = books.add("a", account)
    books.ledger.hand_out(share)
    assert books.ledger.bind(share) is not None
    books.ledger.fail(account)
    assert books.ledger.bind(share) is None
    assert share.derived == 2


def test_lanes_take_turns_and_batches_are_cut() -> None:
    books = Books()
    for number in range(4):
        books.add(f"x{number}", lane="x")
        books.add(f"y{number}", lane="y")
    batches = [[item.broker_payload for item in books.ledger.take_batch(3)] for _ in range(5)]
    assert batches == [["x0", "x1", "x2"], ["y0", "y1", "y2"], ["x3"], ["y3"], []]


def test_a_lane_that_is_empty_is_forgotten() -> None:
    books = Books()
    for number in range(10):
        books.add("a", lane=f"message {number}")
        assert len(books.take()) == 1
    assert books.ledger._lanes == {}


def test_closing_abandons_the_unresolved_and_keeps_the_resolved() -> None:
    books = Books()
    account = books.ledger.join()
    done, open_share = books.add("done", account) + books.add("open", account)
    books.ledger.hand_out(done)
    books.ledger.move_past(done)
    books.ledger.hand_out(open_share)
    seq = books.ledger.bind(open_share)
    assert seq is not None
    books.ledger.close()
    assert len(books.seqs) == 0
    books.ledger.move_past(open_share)
    books.seqs.confirm([seq])
    assert books.take() == [AdvanceItem("done", AdvanceOutcome(acked=1))]
    assert books.take() == []


class ModelShare:
    """A share as a reader of the seed would write it down."""

    def __init__(self, share: Share, subscriber: int) -> None:
        self.share = share
        self.subscriber = subscriber
        self.pulled = False
        self.passed = False
        self.bound: set[int] = set()
        self.confirmed: set[int] = set()
        self.refused = False
        self.forced: str | None = None

    @property
    def outcome(self) -> str | None:
        if self.forced is not None:
            return self.forced
        if self.passed and self.bound == self.confirmed:
            return "rejected" if self.refused else "acked"
        return None


class LedgerMachine(RuleBasedStateMachine):
    """Random subscribers, broadcasts, pulls, confirmations, failures and advances, in any order."""

    accounts: Bundle[int] = Bundle("accounts")
    seqs: Bundle[int] = Bundle("seqs")

    def __init__(self) -> None:
        super().__init__()
        self.books = Books()
        self.joined: list[Account] = []
        self.online: set[int] = set()
        self.current: dict[int, ModelShare] = {}
        self.queues: dict[int, list[ModelShare]] = {}
        self.events: list[tuple[int, str, list[ModelShare]]] = []
        self.advanced: dict[str, list[int]] = {"x": [], "y": []}
        self.owners: dict[int, ModelShare] = {}
        self.now = 0.0

    def model_shares(self, subscriber: int) -> list[ModelShare]:
        return [share for _, _, shares in self.events for share in shares if share.subscriber == subscriber]

    @rule(target=accounts)
    def join(self) -> int:
        number = len(self.joined)
        self.joined.append(self.books.ledger.join())
        self.online.add(number)
        self.queues[number] = []
        return number

    @rule(lane=st.sampled_from("xy"))
    def broadcast(self, lane: str) -> None:
        self.now += 1
        online = sorted(self.online)
        event = len(self.events)
        shares = self.books.ledger.add_event(event, lane, None, self.now, [self.joined[number] for number in online])
        models = [ModelShare(share, number) for share, number in zip(shares, online, strict=True)]
        self.events.append((event, lane, models))
        for model in models:
            self.queues[model.subscriber].append(model)

    @rule(account=accounts)
    def pull(self, account: int) -> None:
        if account not in self.online:
            return
        current = self.current.pop(account, None)
        if current is not None:
            self.books.ledger.move_past(current.share)
            current.passed = True
        if self.queues[account]:
            model = self.queues[account].pop(0)
            self.books.ledger.hand_out(model.share)
            model.pulled = True
            self.current[account] = model

    @rule(target=seqs, account=accounts)
    def fire(self, account: int) -> MultipleResults[int] | int:
        model = self.current.get(account)
        if model is None:
            return multiple()
        resolved = model.outcome is not None
        seq = self.books.ledger.bind(model.share)
        assert (seq is None) == resolved
        if seq is None:
            return multiple()
        assert seq not in self.owners
        model.bound.add(seq)
        self.owners[seq] = model
        return seq

    @rule(seq=consumes(seqs), refused=st.booleans())
    def confirm(self, seq: int, refused: bool) -> None:
        model = self.owners[seq]
        late = model.outcome is not None
        self.books.seqs.confirm([seq], refused=refused)
        if not late:
            model.confirmed.add(seq)
            model.refused = model.refused or refused

    @rule(account=accounts)
    def reject(self, account: int) -> None:
        model = self.current.get(account)
        if model is None:
            return
        had_outcome = model.outcome is not None
        assert self.books.ledger.reject(model.share) == (not had_outcome)
        if not had_outcome:
            model.forced = "rejected"

    @rule(account=accounts)
    def fail(self, account: int) -> None:
        self.books.ledger.fail(self.joined[account])
        self.online.discard(account)
        self.queues[account].clear()
        for model in self.model_shares(account):
            if model.outcome is None:
                model.forced = "failed"

    @rule(account=accounts, cut_short=st.booleans())
    def leave(self, account: int, cut_short: bool) -> None:
        if account not in self.online:
            return
        self.books.ledger.leave(self.joined[account], cut_short=cut_short)
        self.online.discard(account)
        self.queues[account].clear()
        self.current.pop(account, None)
        for model in self.model_shares(account):
            if model.outcome is None and (not model.pulled or (cut_short and not model.passed)):
                model.forced = "failed"
            model.passed = model.passed or model.pulled

    @rule(ago=st.integers(0, 3))
    def expire_departed(self, ago: int) -> None:
        now = self.now - ago
        self.books.ledger.expire_departed(now)
        for event, _, shares in self.events:
            for model in shares:
                if model.outcome is None and model.subscriber not in self.online and event + 1 <= now:
                    model.forced = "failed"

    @rule()
    def advance(self) -> None:
        expected = {lane: self.expected_prefix(lane) for lane in "xy"}
        batch = self.books.ledger.take_batch(BATCH_EVENTS_MAX)
        if not batch:
            assert expected == {"x": [], "y": []}
            return
        lane = self.events[batch[0].broker_payload][1]
        assert batch == expected[lane][:BATCH_EVENTS_MAX]
        self.advanced[lane].extend(item.broker_payload for item in batch)

    def expected_prefix(self, lane: str) -> list[AdvanceItem]:
        """The lane's contiguous resolved prefix, by the model."""
        prefix: list[AdvanceItem] = []
        for event, its_lane, shares in self.events:
            if its_lane != lane or event in self.advanced[lane]:
                continue
            if any(model.outcome is None for model in shares):
                break
            counts = Counter([model.outcome for model in shares] or ["failed"])
            outcome = AdvanceOutcome(counts["acked"], counts["failed"], counts["rejected"])
            prefix.append(AdvanceItem(event, outcome))
        return prefix

    @invariant()
    def every_share_stands_where_the_model_says(self) -> None:
        for _, _, shares in self.events:
            for model in shares:
                state = model.share.state
                if model.outcome is None:
                    expected = "passed" if model.passed else "open" if model.pulled else "queued"
                    assert state.value == expected
                else:
                    assert state.value == model.outcome

    @invariant()
    def nothing_is_acked_with_an_unconfirmed_seq(self) -> None:
        for _, _, shares in self.events:
            for model in shares:
                if model.share.state is ShareState.ACKED:
                    assert model.bound == model.confirmed

    @invariant()
    def the_books_hold_what_is_unresolved_and_no_more(self) -> None:
        unresolved = [model for _, _, shares in self.events for model in shares if model.outcome is None]
        assert sum(len(account.shares) for account in self.joined) == len(unresolved)
        assert len(self.books.seqs) == sum(len(model.bound - model.confirmed) for model in unresolved)
        assert self.books.ledger.outstanding == len(self.events) - sum(map(len, self.advanced.values()))
        assert self.books.ledger.is_ready == any(self.expected_prefix(lane) for lane in "xy")


LedgerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLedgerAgainstTheModel = LedgerMachine.TestCase
