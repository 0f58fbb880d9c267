"""Groups and sessions: admission, starts, ends, liveness, and lookups.

    session   open ──► closing ──► completed        `ends.sealing.end`; running calls may still commit
                ├──► completed, failed, abandoned   ended without running calls, or with an error, or silent
    group     running ──► ready ──► leased ──► trained     `ends.settling`, then `training.leases`
                ├──► rejected                       too few sessions with trainable trajectories
                └──► evaluated                      an evaluation: never trained, never counted

An ended session is *built* once its trajectories exist. A group leaves `running` when all its sessions are built.
"""
