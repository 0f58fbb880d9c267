"""The store: plain functions over a SQLAlchemy connection, grouped by what they touch.

database        transactions that outlast faults, migrations
writer          the group commit
faults          what a database error means, and what to do
sqlite_file     a SQLite database as a file: where it may lie, whether it is whole
runs            runs, tasks, weight versions
sessions        admission, groups, sessions and how they end
family          a session's tree of sub-agents' sessions
interactions    one model call: intent, commit, failure, and a session's token tree
responses       what clients of the Responses API may name again
rewards         append-only rewards
keys            who may do what: hashes of keys, when they end
trajectories    paths of a session: built at its end, loaded for the loss
steps           trainer epochs, leases, completion, publishing, resume
engines         what replicas believe of them, who changes their weights
events          the timeline
retention       removes what no lineage needs
backup          a copy of the database while it is in use
dialect         an insert that knows conflicts, for either database
codec           arrays, JSON, ids and hashes
"""

from sqlalchemy import Connection, Row

from agentrl.store.db.database import Database

__all__ = ["Connection", "Database", "Row"]
