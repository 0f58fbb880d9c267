"""The store: plain functions over a SQLAlchemy connection, grouped in rooms by what they read and write.

db/        one database: transactions, the group commit, faults, migrations, values as bytes
tables     the schema
events     the run's timeline
heartbeats when each proxy replica and worker was last seen
family     the tree of a session and its sub-agents' sessions
engine_claims  the state of each engine, and which replica may change its weights
runs       runs, tasks, weight versions
key_records   hashes of keys: what each opens, and until when
calls/     model calls: intents, outcomes, deliveries, conversations
training/  trajectories, rewards, leases, steps, published versions
sessions/  admission, groups, sessions; ends/: how sessions end and settle
evaluation_episodes  evaluations, computed from their sessions
exports/   rows of a run, page by page
audit/     checks a run's promises from its rows
upkeep/    retention, vacuum, backup
silence    what a replica decides about silent replicas and sessions
activity, run_view  a run as status pages and the API show it

Rooms import only rooms that are listed above them; an import contract checks it.
"""

from sqlalchemy import Connection, Row

from agentrl.store.db.database import Database

__all__ = ["Connection", "Database", "Row"]
