"""Database URLs, and connections to PostgreSQL."""

import traceback

import pytest
from sqlalchemy import make_url, text

from agentrl.errors import StoreError, UserError
from agentrl.store import Database


@pytest.mark.parametrize("url", ["nonsense", "mysql://x/y", "sqlite://", "sqlite:///:memory:"])
def test_bad_urls_are_refused(url):
    with pytest.raises(UserError):
        Database(url)


@pytest.mark.parametrize("url", ["mysql://me:secret@x/y", "me:secret@x/y", "postgresql://me:the@secret:secret@x/y"])
def test_an_error_about_a_url_keeps_its_password(url):
    with pytest.raises(UserError) as caught:
        Database(url)
    assert "secret" not in "".join(traceback.format_exception(caught.value))


def test_a_postgresql_database_that_does_not_exist_is_not_waited_for(databases):
    with databases.lent("postgresql") as url:
        missing = Database(make_url(url).set(database="missing").render_as_string(hide_password=False))
        with pytest.raises(StoreError, match="does not exist"):
            missing.query(lambda conn: None)


def test_connections_to_postgresql_are_named_and_do_not_idle_in_a_transaction(databases):
    with databases.lent("postgresql") as url:
        for query, name in (({}, "agentrl"), ({"application_name": "mine"}, "mine")):
            db = Database(make_url(url).update_query_dict(query).render_as_string(hide_password=False))
            show = "SELECT current_setting('application_name'), current_setting('idle_in_transaction_session_timeout')"
            assert db.query(lambda conn, show=show: tuple(conn.execute(text(show)).one())) == (name, "1min")
            db.close()
