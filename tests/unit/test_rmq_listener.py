"""The listener on a fake broker, turn by turn: sessions, consumers, settlements, silence, backoff, depth, draining."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from inference_worker.deadlines import Bounded
from inference_worker.delivery import Delivery, Settlement
from inference_worker.disposition import Ack, Reject, Republish, Requeue
from inference_worker.documents import QueueDepth
from inference_worker.errors import BrokerError, BrokerUnusable
from inference_worker.holds import HoldName, ListenerState
from tests.fakes.listening import LATER_S, NAMES, ListenerBench
from tests.fakes.steps import make_delivery
from tests.timeouts import LONG_TIMEOUT_S

UNHEALTHY, SUSPECT = HoldName.MODEL_UNHEALTHY, HoldName.MODEL_SUSPECT


@pytest.fixture
def bench() -> Iterator[ListenerBench]:
    bench = ListenerBench()
    yield bench
    bench.close()


def events(caplog: pytest.LogCaptureFixture, name: str) -> list[Any]:
    return [entry for entry in caplog.records if getattr(entry, "event", None) == name]


# -- connecting and consuming -----------------------------------------------------------------------------------------


def test_it_declares_then_sets_the_prefetch_then_consumes(bench: ListenerBench) -> None:
    assert bench.listener.state is ListenerState.CONNECTING
    bench.consume()
    assert bench.listener.state is ListenerState.CONSUMING
    steps = [call[0] for call in bench.calls("exchange_declare", "queue_declare", "basic_qos", "basic_consume")]
    assert steps[-2:] == ["basic_qos", "basic_consume"]
    assert set(steps[:-2]) == {"exchange_declare", "queue_declare"}
    assert bench.calls("basic_qos") == [("basic_qos", 2)]


def test_consuming_begins_right_after_connecting_without_a_wait_for_something_to_happen() -> None:
    """It would cost half a second at each start and at each reconnect."""
    bench, count = ListenerBench(), 6
    began_at = monotonic()
    for _ in range(count):
        bench.listener.tick(monotonic() + LATER_S)
        bench.listener.tick(monotonic())
        assert bench.listener.state is ListenerState.CONSUMING
        bench.broker.drop_link(bench.connection)
        bench.listener.tick(monotonic())
    assert monotonic() - began_at < count * 0.5 / 2
    bench.close()


def test_it_does_not_consume_while_a_hold_is_raised_and_is_connected_all_the_same(bench: ListenerBench) -> None:
    bench.holds.raise_hold(UNHEALTHY, "not probed yet")
    bench.turn()
    bench.turn()
    assert bench.listener.state is ListenerState.HELD
    assert bench.consumer_count == 0
    bench.holds.lift(UNHEALTHY)
    bench.turn()
    assert bench.listener.state is ListenerState.CONSUMING


def test_a_delivery_carries_its_session_its_headers_and_its_flag(bench: ListenerBench) -> None:
    bench.consume()
    bench.broker.publish(NAMES.queue, b"a", redelivered=True)
    (delivery,) = bench.take(1)
    assert (delivery.session.number, delivery.tag, delivery.redelivered, delivery.body) == (1, 1, True, b"a")
    assert delivery.headers == {}
    assert delivery.properties.headers is None


def test_no_more_messages_are_in_hand_than_there_are_slots(bench: ListenerBench) -> None:
    bench.consume()
    bench.publish(b"a", b"b", b"c")
    bench.take(2)
    bench.turn()
    assert bench.ready() == [b"c"]
    bench.done(bench.begun[0])
    bench.take(3)
    assert bench.ready() == []


# -- settling ---------------------------------------------------------------------------------------------------------


def test_each_disposition_is_carried_out_once_on_the_channel(bench: ListenerBench) -> None:
    bench.consume()
    bench.publish(b"a", b"b")
    first, second = bench.take(2)
    bench.settle(first, Ack("completed"))
    bench.settle(second, Reject("malformed_request"))
    assert bench.calls("basic_ack", "basic_nack") == [("basic_ack", 1, False), ("basic_nack", 2, False)]
    assert bench.dead() == [b"b"]
    bench.publish(b"c", b"d")
    third, fourth = bench.take(4)[2:]
    bench.settle(third, Republish("model_unavailable", 1), copy_confirmed=True)
    bench.settle(fourth, Requeue("held"))
    assert bench.calls("basic_ack", "basic_nack")[2:] == [("basic_ack", 3, False), ("basic_nack", 4, True)]
    assert bench.listener.stale_settlements_total == 0


def test_a_republish_without_a_confirmed_copy_earns_no_ack(bench: ListenerBench) -> None:
    bench.consume()
    bench.publish(b"a")
    (delivery,) = bench.take(1)
    bench.holds.raise_hold(UNHEALTHY, "so that it does not come again")
    bench.settle(delivery, Republish("model_unavailable", 1))
    assert bench.calls("basic_ack") == []
    assert bench.ready() == [b"a"]


def test_where_a_nack_might_drop_it_a_reject_is_an_ack_after_its_copy_and_a_requeue_without_one(
    bench: ListenerBench,
) -> None:
    bench.broker.make_queue(NAMES.queue, arguments={"x-max-priority": 3})
    bench.consume()
    bench.publish(b"a", b"b")
    first, second = bench.take(2)
    assert first.session.rejects_by_copy
    bench.holds.raise_hold(UNHEALTHY, "so that nothing comes again")
    bench.settle(first, Reject("malformed_request"), copy_confirmed=True)
    bench.settle(second, Reject("internal_error"))
    assert ("basic_ack", 1, False) in bench.calls("basic_ack")
    assert bench.ready() == [b"b"]


def test_the_dead_letter_side_is_declared_again_before_a_reject(bench: ListenerBench) -> None:
    bench.turn(later_s=-LATER_S)
    bench.consume()
    bench.broker.delete_exchange(NAMES.dlx)
    bench.publish(b"a")
    (delivery,) = bench.take(1)
    bench.settle(delivery, Reject("malformed_request"))
    assert bench.dead() == [b"a"]


def test_one_log_line_a_message(bench: ListenerBench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bench.consume()
    bench.publish(b"a secret body")
    (delivery,) = bench.take(1)
    bench.listener.hand_in(Settlement(delivery, Ack("completed"), log_fields={"request_id": "r-1"}))
    bench.turn()
    (line,) = events(caplog, "request_settled")
    assert (line.request_id, line.session, line.retry_count, line.disposition, line.reason) == (
        "r-1",
        1,
        0,
        "ack",
        "completed",
    )
    assert line.elapsed_s >= 0
    assert "secret" not in caplog.text


def test_what_was_settled_has_its_line_when_the_link_dies_before_the_next_is(
    bench: ListenerBench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bench.consume()
    bench.publish(b"a", b"b")
    first, second = bench.take(2)
    settle = bench.listener.settle

    def settle_while_the_link_dies(settlement: Settlement) -> str:
        done = settle(settlement)
        if settlement.delivery is first:
            bench.broker.drop_link(bench.connection)
            bench.holds.raise_hold(UNHEALTHY, "so that the consumer has to be cancelled before the second")
        return done

    bench.listener.settle = settle_while_the_link_dies  # type: ignore[method-assign]
    for delivery in (first, second):
        bench.listener.hand_in(Settlement(delivery, Ack("completed")))
    bench.turn()
    assert events(caplog, "session_ended")
    assert [line.disposition for line in events(caplog, "request_settled")] == ["ack"]


def test_r05_a_settlement_handed_in_on_a_dead_connection_raises_nothing_and_is_counted(bench: ListenerBench) -> None:
    bench.consume()
    bench.publish(b"a")
    (delivery,) = bench.take(1)
    bench.broker.drop_link(bench.connection)
    bench.listener.hand_in(Settlement(delivery, Ack("completed")))
    bench.turn()
    assert delivery.session.ended
    bench.listener.hand_in(Settlement(delivery, Ack("completed")))
    bench.turn_until(lambda: len(bench.begun) == 2)
    assert bench.listener.stale_settlements_total == 2
    assert bench.calls("basic_ack") == []
    assert bench.begun[1].redelivered


def test_r06_an_old_tag_does_not_ack_the_message_that_bears_it_now(bench: ListenerBench) -> None:
    bench.consume()
    bench.publish(b"m1")
    (old,) = bench.take(1)
    bench.broker.drop_link(bench.connection)
    # another worker takes m1, ours gets m2 under the tag that m1 had
    method, _, body = bench.broker.connect().channel().basic_get(NAMES.queue)
    assert (method.redelivered, body) == (True, b"m1")
    bench.publish(b"m2")
    bench.turn_until(lambda: len(bench.begun) == 2)
    new = bench.begun[1]
    assert (new.body, new.tag, new.session.number) == (b"m2", old.tag, 2)
    bench.done(old)
    assert bench.calls("basic_ack", "basic_nack") == []
    assert b"m2" in bench.unacked()
    assert bench.listener.stale_settlements_total == 1
    assert bench.channel.is_open


def test_r07_the_second_settlement_of_a_delivery_sends_nothing(bench: ListenerBench) -> None:
    bench.consume()
    bench.publish(b"a")
    (delivery,) = bench.take(1)
    bench.holds.raise_hold(UNHEALTHY, "so that it does not come again")
    bench.settle(delivery, Requeue("cut_off"))
    bench.settle(delivery, Ack("completed"))
    bench.turn()
    assert bench.calls("basic_ack", "basic_nack") == [("basic_nack", 1, True)]
    assert bench.listener.stale_settlements_total == 1
    assert bench.channel.is_open
    assert bench.ready() == [b"a"]


@pytest.mark.parametrize("tag", [0, 7, -1])
def test_r08_a_tag_that_was_never_given_is_never_sent(bench: ListenerBench, tag: int) -> None:
    bench.consume()
    bench.publish(b"a", b"b")
    first, _ = bench.take(2)
    bench.done(make_delivery(session=first.session, tag=tag))
    assert bench.calls("basic_ack", "basic_nack") == []
    assert bench.listener.stale_settlements_total == 1
    assert sorted(bench.unacked()) == [b"a", b"b"]


def test_a_settlement_ends_the_wait_of_a_turn() -> None:
    """Left to the end of the wait, each of these would take half a second."""
    count = 8
    bench = ListenerBench(prefetch=1, work=lambda each: bench.listener.hand_in(Settlement(each, Ack("completed"))))
    bench.consume()
    bench.publish(*[b"x"] * count)
    began_at = monotonic()
    while len(bench.calls("basic_ack")) < count:
        bench.listener.tick(monotonic())
        assert monotonic() - began_at < LONG_TIMEOUT_S
    assert monotonic() - began_at < count * 0.5 / 2
    bench.close()


# -- suspending -------------------------------------------------------------------------------------------------------


def test_r12_a_hold_cancels_first_then_gives_back_what_no_slot_has_begun() -> None:
    bench = ListenerBench(prefetch=8, slot_count=3)
    bench.may_end.clear()
    bench.consume()
    bench.publish(*(b"%d" % number for number in range(8)))
    bench.take(3)
    bench.turn()
    bench.holds.raise_hold(UNHEALTHY, "refused")
    bench.turn()
    assert bench.listener.state is ListenerState.HELD
    assert [call[0] for call in bench.calls("basic_cancel", "basic_nack")] == ["basic_cancel"] + ["basic_nack"] * 5
    assert sorted(bench.ready()) == [b"3", b"4", b"5", b"6", b"7"]
    assert sorted(bench.unacked()) == [b"0", b"1", b"2"]
    bench.done(bench.begun[0])
    assert bench.calls("basic_ack") == [("basic_ack", 1, False)]
    assert bench.listener.stale_settlements_total == 0
    bench.close()


def test_a_delivery_between_the_cancel_and_its_answer_goes_back(bench: ListenerBench) -> None:
    bench.consume()
    bench.holds.raise_hold(UNHEALTHY, "refused")
    # sent by the broker, and not read by the time of the cancel
    bench.publish(b"a")
    bench.listener.suspend_consuming()
    bench.turn()
    assert bench.ready() == [b"a"]
    assert bench.unacked() == []


def test_it_cancels_before_it_settles_even_when_the_hold_came_after_the_look(bench: ListenerBench) -> None:
    """A slot raises its hold, publishes its copy and hands in, all in the middle of a turn (R48, R52)."""
    bench.consume()
    bench.publish(b"a", b"b")
    first, second = bench.take(2)
    settle = bench.listener.settle

    def settle_while_a_slot_hands_in(settlement: Settlement) -> str:
        done = settle(settlement)
        if settlement.delivery is first:
            bench.holds.raise_hold(UNHEALTHY, "refused")
            bench.listener.hand_in(Settlement(second, Republish("model_unavailable", 1), copy_confirmed=True))
        return done

    bench.listener.settle = settle_while_a_slot_hands_in  # type: ignore[method-assign]
    bench.done(first)
    steps = [call[0] for call in bench.calls("basic_ack", "basic_cancel")]
    assert steps == ["basic_ack", "basic_cancel", "basic_ack"]


def test_r03_a_suspended_session_is_pumped_and_the_same_one_consumes_again(bench: ListenerBench) -> None:
    bench.consume()
    bench.holds.raise_hold(UNHEALTHY, "503")
    pumped_before = len(bench.calls("process_data_events"))
    for _ in range(20):
        bench.turn()
    assert len(bench.calls("process_data_events")) == pumped_before + 20
    first_tag = bench.calls("basic_cancel")[0][1]
    bench.holds.lift(UNHEALTHY)
    bench.turn()
    assert bench.listener.state is ListenerState.CONSUMING
    assert bench.channel.consumer_tags not in ([], [first_tag])
    assert bench.listener.reconnects_total == 0


class OneConsumer(RuleBasedStateMachine):
    """Whatever is raised, lifted, lost and delivered, in whatever order: at most one consumer, none while held."""

    @initialize()
    def begin(self) -> None:
        self.bench = ListenerBench(prefetch=3)
        self.bench.turn_until(lambda: not self.bench.listener._session.ended)
        self.published = 0
        self.settled: set[bytes] = set()

    @rule(name=st.sampled_from([UNHEALTHY, SUSPECT, HoldName.RESULT_STORE_DOWN]))
    def raise_hold(self, name: HoldName) -> None:
        self.bench.holds.raise_hold(name, "why")

    @rule(name=st.sampled_from([UNHEALTHY, SUSPECT, HoldName.RESULT_STORE_DOWN]))
    def lift_hold(self, name: HoldName) -> None:
        self.bench.holds.lift(name)

    @rule()
    def turn(self) -> None:
        self.bench.turn(later_s=LATER_S)

    @rule()
    def publish(self) -> None:
        if self.bench.broker.has_queue(NAMES.queue):
            self.published += 1
            self.bench.publish(b"%d" % self.published)

    @rule(index=st.integers(0, 9), requeue=st.booleans())
    def settle(self, index: int, requeue: bool) -> None:
        # which are begun by now is up to the slots: nothing that is drawn may depend on it
        begun = list(self.bench.begun)
        if not begun:
            return
        delivery = begun[index % len(begun)]
        unsettled = self.bench.listener._unsettled
        counts = delivery.session is self.bench.listener._session and delivery.tag in unsettled
        self.bench.listener.hand_in(Settlement(delivery, Requeue("x") if requeue else Ack("completed")))
        if counts and not requeue:
            self.settled.add(delivery.body)

    @rule(how=st.sampled_from(["link", "channel", "consumer"]))
    def lose(self, how: str) -> None:
        broker, listener = self.bench.broker, self.bench.listener
        if listener._session.ended or not listener._connection.is_open or not listener._channel.is_open:
            return
        match how:
            case "link":
                broker.drop_link(listener._connection)
            case "channel":
                broker.close_channel(listener._channel, 406, "PRECONDITION_FAILED - ack timed out")
            case _:
                broker.cancel_consumers(NAMES.queue)

    @invariant()
    def there_is_at_most_one_consumer(self) -> None:
        if hasattr(self, "bench"):
            assert self.bench.consumer_count <= 1

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        bench.holds.raise_hold(UNHEALTHY, "the end")
        for _ in range(4):
            bench.turn(later_s=LATER_S)
        assert bench.consumer_count == 0
        for name in (UNHEALTHY, SUSPECT, HoldName.RESULT_STORE_DOWN):
            bench.holds.lift(name)
        bench.turn_until(lambda: bench.consumer_count == 1)
        # no message is lost: what was not acked is there or in hand
        there = {*bench.ready(), *bench.unacked()}
        everything = {b"%d" % number for number in range(1, self.published + 1)}
        assert everything - there <= self.settled
        assert all(call[1] != 0 for call in bench.calls("basic_ack", "basic_nack"))
        bench.close()


OneConsumer.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestOneConsumerWhateverTheOrderOfHoldsAndLosses = OneConsumer.TestCase


# -- what pika says nothing about -------------------------------------------------------------------------------------


def close_channel(bench: ListenerBench) -> None:
    bench.broker.close_channel(bench.channel, 406, "PRECONDITION_FAILED - delivery acknowledgement timed out")


def cancel_consumer(bench: ListenerBench) -> None:
    bench.broker.cancel_consumers(NAMES.queue)


def delete_queue(bench: ListenerBench) -> None:
    bench.broker.delete_queue(NAMES.queue)


def drop_link(bench: ListenerBench) -> None:
    bench.broker.drop_link(bench.connection)


@pytest.mark.parametrize("lose", [close_channel, cancel_consumer, delete_queue, drop_link])
def test_r09_r17_a_loss_is_noticed_in_the_next_turn_and_made_good(
    bench: ListenerBench, lose: Callable[[ListenerBench], None]
) -> None:
    bench.consume()
    lose(bench)
    bench.turn()
    assert bench.listener.state is ListenerState.CONNECTING
    assert bench.listener.reconnects_total == 1
    bench.consume()
    assert bench.listener.state is ListenerState.CONSUMING
    bench.publish(b"a")
    bench.take(1)
    assert bench.begun[0].session.number == 2


def test_r17_a_channel_that_closes_while_we_hold_is_noticed_too(bench: ListenerBench) -> None:
    bench.consume()
    bench.holds.raise_hold(UNHEALTHY, "503")
    bench.turn()
    close_channel(bench)
    bench.turn()
    assert bench.listener.state is ListenerState.CONNECTING


def test_what_waited_for_a_slot_is_forgotten_with_its_session() -> None:
    bench = ListenerBench(prefetch=4, slot_count=1)
    bench.may_end.clear()
    bench.consume()
    bench.publish(b"a", b"b", b"c")
    bench.take(1)
    bench.turn()
    drop_link(bench)
    bench.turn()
    assert bench.slots.take_back() == []
    bench.may_end.set()
    bench.turn_until(lambda: len(bench.begun) == 4)
    assert [delivery.body for delivery in bench.begun] == [b"a", b"a", b"b", b"c"]
    bench.close()


def test_r10_cut_again_and_again_while_it_connects_there_is_one_consumer_in_the_end(bench: ListenerBench) -> None:
    bench.broker.connect_errors.append(BrokerError("cut in connect"))
    bench.turn()
    bench.turn(later_s=LATER_S)
    drop_link(bench)
    bench.turn(later_s=LATER_S)
    bench.consume()
    drop_link(bench)
    bench.publish(b"a")
    bench.take(1)
    assert bench.consumer_count == 1
    assert sum(each.is_open for each in bench.broker.connections if each.purpose == "consumer") == 1


# -- the backoff ------------------------------------------------------------------------------------------------------


def test_the_backoff_is_1_2_4_up_to_30_s_less_at_most_20_percent(bench: ListenerBench) -> None:
    bench.broker.connect_errors.extend(BrokerError("refused") for _ in range(9))
    waits_s = [bench.turn(later_s=LATER_S * number) for number in range(1, 9)]
    for wait_s, full_s in zip(waits_s, [1, 2, 4, 8, 16, 30, 30, 30], strict=True):
        assert 0.8 * full_s <= wait_s <= full_s


def test_the_backoff_differs_from_worker_to_worker(bench: ListenerBench) -> None:
    bench.broker.connect_errors.extend(BrokerError("refused") for _ in range(40))
    waits_s = [bench.turn(later_s=LATER_S * number) for number in range(1, 41)][5:]
    assert len(set(waits_s)) > 10


def test_no_connect_is_tried_before_the_backoff_is_over(bench: ListenerBench) -> None:
    bench.broker.connect_errors.append(BrokerError("refused"))
    bench.turn()
    assert 0 < bench.turn() <= 1.0
    assert len(bench.calls("connect")) == 1


def test_the_backoff_begins_anew_once_consuming_again_and_not_before(bench: ListenerBench) -> None:
    bench.broker.connect_errors.extend(BrokerError("refused") for _ in range(5))
    for number in range(1, 6):
        bench.turn(later_s=LATER_S * number)
    bench.holds.raise_hold(UNHEALTHY, "503")
    bench.turn(later_s=LATER_S * 6)
    drop_link(bench)
    assert bench.turn() >= 0.8 * 30
    bench.holds.lift(UNHEALTHY)
    bench.turn(later_s=LATER_S * 8)
    bench.turn()
    assert bench.listener.state is ListenerState.CONSUMING
    bench.publish(b"m")
    bench.done(bench.take(1)[0])
    drop_link(bench)
    assert bench.turn() <= 1.0


def test_r29_sessions_that_end_right_after_they_began_back_off_and_are_said_at_error(
    bench: ListenerBench, caplog: pytest.LogCaptureFixture
) -> None:
    delays = []
    for number in range(1, 6):
        bench.turn(later_s=LATER_S * number)
        bench.turn()
        assert bench.listener.state is ListenerState.CONSUMING
        drop_link(bench)
        delays.append(bench.turn())
    assert all(low * 0.8 <= delay <= low for low, delay in zip((1, 2, 4, 8, 16), delays, strict=True)), delays
    assert [record.levelno for record in events(caplog, "session_ended")][-2:] == [logging.ERROR] * 2


def test_a_consumer_that_begins_while_calls_run_may_have_only_what_slots_are_free_for() -> None:
    bench = ListenerBench(prefetch=3)
    bench.consume()
    bench.may_end.clear()
    bench.publish(b"1", b"2")
    bench.take(2)
    bench.publish(b"3", b"4")
    bench.take(3)
    bench.holds.raise_hold(UNHEALTHY, "503")
    bench.turn_until(lambda: bench.consumer_count == 0)
    bench.holds.lift(UNHEALTHY)
    for _ in range(3):
        bench.turn()
    assert bench.consumer_count == 0
    assert bench.ready() == [b"4"]
    bench.may_end.set()
    bench.take(4)
    bench.turn_until(lambda: bench.listener._granted == 3)
    assert bench.consumer_count == 1
    bench.close()


def test_r12_a_new_session_takes_no_more_than_there_are_free_slots() -> None:
    bench = ListenerBench(prefetch=2)
    bench.consume()
    bench.may_end.clear()
    bench.publish(b"1", b"2", b"3")
    bench.take(2)
    drop_link(bench)
    bench.turn()
    for number in range(1, 4):
        bench.turn(later_s=LATER_S * number)
    assert bench.listener.state is ListenerState.HELD
    assert sorted(bench.ready()) == [b"1", b"2", b"3"]
    bench.close()


@pytest.mark.parametrize(
    ("error", "level"), [(BrokerUnusable("unknown host"), logging.ERROR), (BrokerError("refused"), logging.WARNING)]
)
def test_r14_a_failure_to_connect_is_said_at_its_level_and_not_at_every_try(
    bench: ListenerBench, caplog: pytest.LogCaptureFixture, error: Exception, level: int
) -> None:
    bench.broker.connect_errors.extend([error] * 12)
    for number in range(1, 13):
        bench.turn(later_s=LATER_S * number)
    assert [entry.levelno for entry in events(caplog, "connect_failed")] == [level] * 2
    assert bench.listener.state is ListenerState.CONNECTING


def test_a_refused_declaration_is_tried_again_like_a_refused_connect_and_leaves_no_connection_open(
    bench: ListenerBench,
) -> None:
    bench.broker.may_configure = False
    assert bench.turn() > 0
    assert bench.listener.state is ListenerState.CONNECTING
    assert not bench.connection.is_open
    bench.broker.may_configure = True
    bench.consume()


def test_settlements_are_dropped_and_counted_while_there_is_no_session(bench: ListenerBench) -> None:
    bench.consume()
    bench.publish(b"a")
    (delivery,) = bench.take(1)
    drop_link(bench)
    bench.turn()
    bench.listener.hand_in(Settlement(delivery, Ack("completed")))
    bench.turn()
    assert bench.listener.stale_settlements_total == 1
    assert bench.listener.is_settled


# -- the depth of the queues ------------------------------------------------------------------------------------------


def ask_depth(bench: ListenerBench) -> QueueDepth | None:
    answers: list[QueueDepth | None] = []
    asker = threading.Thread(target=lambda: answers.append(bench.listener.queue_depth(LONG_TIMEOUT_S)))
    asker.start()
    while asker.is_alive():
        bench.turn()
    return answers[0]


def test_the_depth_of_both_queues_is_what_the_broker_says(bench: ListenerBench) -> None:
    bench.consume()
    bench.publish(b"a", b"b", b"c")
    bench.take(2)
    bench.broker.publish(NAMES.dlq, b"dead")
    assert ask_depth(bench) == QueueDepth(depth=1, consumers=1, dead_letter_depth=1)


def test_r21_a_missing_queue_is_unknown_the_rest_stands_and_the_consumer_is_untouched(bench: ListenerBench) -> None:
    bench.consume()
    tags = bench.channel.consumer_tags
    bench.broker.delete_queue(NAMES.dlq)
    for _ in range(3):
        assert ask_depth(bench) == QueueDepth(depth=0, consumers=1, dead_letter_depth=None)
    assert bench.channel.consumer_tags == tags
    assert bench.listener.reconnects_total == 0
    bench.broker.make_queue(NAMES.dlq)
    bench.broker.publish(NAMES.dlq, b"dead")
    assert ask_depth(bench) == QueueDepth(depth=0, consumers=1, dead_letter_depth=1)


def test_the_depth_is_unknown_without_a_session_and_without_an_answer_in_time(bench: ListenerBench) -> None:
    assert bench.listener.queue_depth(LONG_TIMEOUT_S) is None
    bench.consume()
    assert bench.listener.queue_depth(0.01) is None


# -- draining, closing, and the bound on a turn -----------------------------------------------------------------------


def drain(bench: ListenerBench) -> None:
    bench.holds.raise_hold(HoldName.DRAINING, "stop was asked for")
    bench.listener.drain()


def test_draining_stops_consuming_gives_back_what_is_not_begun_and_settles_the_rest() -> None:
    bench = ListenerBench(prefetch=3, slot_count=1)
    bench.may_end.clear()
    bench.consume()
    bench.publish(b"a", b"b", b"c")
    bench.take(1)
    bench.turn()
    drain(bench)
    bench.turn()
    assert bench.listener.state is ListenerState.DRAINING
    assert sorted(bench.ready()) == [b"b", b"c"]
    assert not bench.listener.is_settled
    bench.done(bench.begun[0])
    assert bench.listener.is_settled
    assert bench.unacked() == []
    bench.close()


def test_a_draining_listener_never_connects_again(bench: ListenerBench) -> None:
    bench.consume()
    bench.publish(b"a")
    (delivery,) = bench.take(1)
    drain(bench)
    drop_link(bench)
    for number in range(5):
        bench.turn(later_s=LATER_S * number)
    bench.done(delivery)
    assert len(bench.calls("connect")) == 1
    assert bench.listener.is_settled
    assert bench.listener.stale_settlements_total == 1


def test_draining_never_resumes_even_when_every_hold_is_lifted(bench: ListenerBench) -> None:
    bench.consume()
    drain(bench)
    bench.turn()
    bench.holds.lift(HoldName.DRAINING)
    bench.turn()
    assert bench.consumer_count == 0


def test_close_gives_back_with_the_connection_what_is_unsettled(bench: ListenerBench) -> None:
    bench.consume()
    bench.publish(b"a")
    (delivery,) = bench.take(1)
    bench.listener.close()
    assert delivery.session.ended
    assert bench.ready() == [b"a"]
    assert not bench.connection.is_open
    bench.listener.close()


def test_closing_without_a_connection_does_nothing(bench: ListenerBench) -> None:
    bench.listener.close()
    assert bench.calls("close") == []


def test_a_turn_on_a_stalled_link_ends_when_its_time_is_over(bench: ListenerBench) -> None:
    bench.consume()
    bench.holds.raise_hold(UNHEALTHY, "so that the next turn has to ask the broker for something")
    bench.broker.stall(bench.connection)
    listener = threading.Thread(target=lambda: bench.listener.tick(monotonic()))
    listener.start()
    bench.broker.wait_until(lambda: bench.calls("basic_cancel"), what="the turn waits for the cancel's answer")
    bench.deadlines.cut_overdue(monotonic() + 29.0)
    assert listener.is_alive()
    bench.deadlines.shorten(Bounded.BROKER_CALL, 1.0)
    bench.deadlines.cut_overdue(monotonic() + 1.1)
    listener.join(LONG_TIMEOUT_S)
    assert not listener.is_alive()
    assert bench.listener.state is ListenerState.CONNECTING


def test_waking_a_listener_without_a_connection_or_with_a_lost_one_raises_nothing(bench: ListenerBench) -> None:
    bench.listener.wake()
    bench.consume()
    bench.connection.close()
    bench.listener.wake()
    assert bench.listener.wakeup.is_set()


# -- threads ----------------------------------------------------------------------------------------------------------


def test_r04_every_call_on_the_consumers_connection_is_made_by_the_listener_thread() -> None:
    count, rounds = 16, 20
    begin = threading.Barrier(count)
    stop = threading.Event()
    settled = threading.Semaphore(0)

    def settle_all_at_once(delivery: Any) -> None:
        begin.wait(LONG_TIMEOUT_S)
        bench.listener.hand_in(Settlement(delivery, Ack("completed")))
        settled.release()

    bench = ListenerBench(prefetch=count, work=settle_all_at_once)

    def listen() -> None:
        while not stop.is_set():
            wait_s = bench.listener.tick(monotonic())
            bench.listener.wakeup.wait(wait_s) if wait_s > 0 else None
            bench.listener.wakeup.clear()
        bench.listener.close()

    def report() -> None:
        while not stop.is_set():
            bench.listener.queue_depth(0.2)

    threads = [threading.Thread(target=listen, name="rmq-listener"), threading.Thread(target=report, name="reporter")]
    for thread in threads:
        thread.start()
    bench.broker.wait_until(lambda: bench.consumer_count == 1, what="consuming")
    for _ in range(rounds):
        bench.publish(*[b"x"] * count)
        for _ in range(count):
            assert settled.acquire(timeout=LONG_TIMEOUT_S)
    bench.broker.wait_until(lambda: len(bench.calls("basic_ack")) == count * rounds, what="all settled")
    stop.set()
    for thread in threads:
        thread.join(LONG_TIMEOUT_S)
    callers = {call.thread for call in bench.broker.calls if call.purpose == "consumer"}
    assert callers == {"rmq-listener"}
    assert bench.listener.reconnects_total == 0
    assert bench.listener.stale_settlements_total == 0
    assert bench.ready() == []
    bench.close()


def test_a_busy_worker_gets_all_its_slots_back_after_a_hold() -> None:
    """With a backlog there is never a moment without calls: its own must not be counted against a consumer."""
    gates: dict[int, threading.Event] = {}

    def work(delivery: Delivery) -> None:
        gates[delivery.tag] = threading.Event()
        assert gates[delivery.tag].wait(LONG_TIMEOUT_S)

    bench = ListenerBench(prefetch=8, work=work)
    bench.consume()
    bench.publish(*(b"%d" % number for number in range(60)))
    bench.turn_until(lambda: bench.slots.in_work_count == 8)
    bench.holds.raise_hold(UNHEALTHY, "503")
    bench.turn_until(lambda: bench.consumer_count == 0)
    bench.holds.lift(UNHEALTHY)
    most = 0
    for _ in range(40):
        oldest = min(bench.slots.in_work(), key=lambda delivery: delivery.tag)
        count = bench.slots.in_work_count
        gates[oldest.tag].set()
        bench.turn_until(lambda count=count, oldest=oldest: not bench.slots.are_in_work({oldest}))  # type: ignore[misc]
        bench.done(oldest)
        bench.turn()
        most = max(most, bench.listener._granted)
    assert most == 8
    assert bench.listener._granted == 8
    for gate in gates.values():
        gate.set()
    bench.slots._work = lambda delivery: None
    bench.close()


def test_r16_a_dead_letter_whose_copy_is_refused_for_good_is_nacked_wherever_the_queue_sends_it(
    bench: ListenerBench,
) -> None:
    bench.consume()
    bench.publish(b"m")
    (delivery,) = bench.take(1)
    delivery.session.rejects_by_copy = True
    bench.listener.hand_in(Settlement(delivery, Reject("malformed_request"), copy_refused=True))
    bench.turn()
    assert bench.unacked() == bench.ready() == []


def test_what_belongs_to_an_ended_session_does_not_hold_a_stop_up(bench: ListenerBench) -> None:
    bench.consume()
    bench.publish(b"m")
    (delivery,) = bench.take(1)
    drop_link(bench)
    bench.turn()
    bench.listener.hand_in(Settlement(delivery, Ack("completed")))
    assert bench.listener.is_settled
