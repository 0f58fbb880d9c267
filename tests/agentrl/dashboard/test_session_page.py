"""The pages of a session show what the store has, and nothing that was recorded can act."""

from __future__ import annotations

import numpy as np
import pytest
from history import History, made_up_facts
from sqlalchemy import select, update

from agentrl.store import Database
from agentrl.store.db import codec
from agentrl.store.tables import interaction_data, interactions
from agentrl.store.training import token_facts

from .token_arrays import arrays_of
from .visitor import Visitor

TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {}}}]
HOSTILE = (
    "</pre></script><script>document.title='owned'</script><img src=x onerror=alert(1)><svg onload=alert(1)>"
    "[link](javascript:alert(1)) \x1b[31mred\x1b[0m \u202eesrever\u202c {{ 7777 * 7777 }}"
)


@pytest.fixture
def history(db: Database) -> History:
    made = History(db, seed=4)
    made.train(1)
    batch = made.batches[1]
    db.transact(token_facts.record, made.run_id, made.epoch, batch.step_id, made_up_facts(batch))
    return made


def trained(history: History) -> str:
    return history.batches[1].trajectories[0].session_id


def test_the_conversation_shows_every_message_and_reward(history: History) -> None:
    page = Visitor(history.db)
    page.open(f"/ui/sessions/{trained(history)}")
    with history.db.read() as conn:
        rows = conn.execute(
            select(interaction_data.c.answer)
            .join(interactions, interactions.c.id == interaction_data.c.interaction_id)
            .where(interactions.c.session_id == trained(history))
        ).scalars()
        answers = [codec.unpack_json(row)["content"] for row in rows]
    assert answers
    for answer in answers:
        assert answer in page.text
    assert "reward turn" in page.text


def test_the_other_session_of_the_group_is_one_click_away_and_beside_it(history: History) -> None:
    page = Visitor(history.db)
    page.open(f"/ui/sessions/{trained(history)}")
    first = page.address
    page.follow("in the group")
    assert page.address != first
    page.follow("beside")
    assert 'class="pair"' in page.page


@pytest.mark.parametrize("tab", ["raw", "timeline", "lineage", "conversation"])
def test_every_view_opens(history: History, tab: str) -> None:
    page = Visitor(history.db)
    page.open(f"/ui/sessions/{trained(history)}?tab={tab}")
    assert f"tab={tab}" in page.page


@pytest.mark.long_on("postgresql")
def test_the_lineage_leads_to_the_step_and_to_the_tokens(history: History) -> None:
    page = Visitor(history.db)
    page.open(f"/ui/sessions/{trained(history)}?tab=lineage")
    assert "/ui/runs/test/steps/1" in page.page
    page.follow(history.batches[1].trajectories[0].trajectory_id[-12:])
    assert 'data-src="/ui/sessions/' in page.page


@pytest.mark.long_on("postgresql")
def test_a_call_can_be_copied_as_curl(history: History) -> None:
    page = Visitor(history.db)
    page.open(f"/ui/sessions/{trained(history)}?tab=raw&call=1")
    assert 'curl -s "$OPENAI_BASE_URL/chat/completions"' in page.text
    assert '"messages"' in page.text


@pytest.mark.long_on("postgresql")
def test_the_token_view_gets_the_facts_of_one_trajectory(history: History) -> None:
    page = Visitor(history.db)
    chosen = history.batches[1].trajectories[0]
    found = page.client.get(f"/ui/sessions/{chosen.session_id}/tokens.json?trajectory={chosen.trajectory_id}").json()
    (path,) = found["paths"]
    arrays = arrays_of(path)
    assert arrays["input_ids"].tolist() == chosen.input_ids.tolist()
    assert (~np.isnan(arrays["entropy"])).tolist() == (chosen.loss_mask | chosen.masked_outputs).tolist()


@pytest.mark.long_on("postgresql")
def test_what_is_not_there_is_not_found(history: History) -> None:
    page, session = Visitor(history.db), trained(history)
    page.open("/ui/sessions/nope", 404)
    page.open(f"/ui/sessions/{session}?tab=raw&call=999", 404)
    page.open(f"/ui/sessions/{session}?beside=nope", 404)
    page.open(f"/ui/sessions/{session}/tokens?trajectory=nope", 404)
    assert "tab: one of conversation" in page.open(f"/ui/sessions/{session}?tab=nope", 400)
    assert "from: a whole number" in page.open(f"/ui/sessions/{session}?from=-1", 400)


@pytest.mark.long_on("postgresql")
def test_what_others_wrote_is_text(history: History) -> None:
    with history.db.write() as conn:
        calls = select(interactions.c.id).where(interactions.c.run_id == history.run_id)
        call = {"id": "1", "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}
        answer = {"role": "assistant", "content": HOSTILE, "tool_calls": [call], "reasoning_content": HOSTILE}
        conn.execute(
            update(interaction_data)
            .where(interaction_data.c.interaction_id.in_(calls))
            .values(
                new_messages=codec.pack_json([{"role": HOSTILE, "content": HOSTILE}]), answer=codec.pack_json(answer)
            )
        )
    page = Visitor(history.db)
    for tab in ("conversation", "raw", "timeline", "lineage"):
        html = page.open(f"/ui/sessions/{trained(history)}?tab={tab}")
        for acts in ("<img", "<svg onload", "<script>", "\x1b", "\u202e"):
            assert acts not in html, (tab, acts)
        assert "60481729" not in html


@pytest.mark.long_on("postgresql")
def test_a_long_text_is_cut(history: History) -> None:
    with history.db.write() as conn:
        conn.execute(
            update(interaction_data).values(answer=codec.pack_json({"role": "assistant", "content": "x" * 10_000_000}))
        )
    page = Visitor(history.db).open(f"/ui/sessions/{trained(history)}")
    assert len(page) < 2_000_000
    assert "more characters" in page


@pytest.mark.long_on("postgresql")
def test_a_request_that_a_page_would_cut_has_no_command(history: History) -> None:
    told = [{"role": "user", "content": "x" * 30_000}]
    with history.db.write() as conn:
        conn.execute(update(interaction_data).values(new_messages=codec.pack_json(told)))
    page = Visitor(history.db)
    page.open(f"/ui/sessions/{trained(history)}?tab=raw&call=1")
    assert "# the request is too long to be shown as a command" in page.text
    assert "curl -s" not in page.text
