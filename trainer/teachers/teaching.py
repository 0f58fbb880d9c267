"""Makes the lessons of each step of a run: from its configuration, and from its store."""

from __future__ import annotations

from pathlib import Path

from agentrl.configs.episodes.teachers import is_server, teachers_of
from agentrl.configs.run_config import RunConfig
from agentrl.domain.batches.outline import BatchOutline
from agentrl.rendering import load_renderer
from agentrl.trainer.distributed import World
from agentrl.trainer.run_lineage import Lineage
from agentrl.trainer.teachers.lessons import Lessons
from agentrl.trainer.teachers.teacher_prompts import TeacherPrompts, write_of
from agentrl.trainer.teachers.teacher_servers import TeacherServers


class Teaching:
    """The teachers of a run, on each rank."""

    def __init__(self, config: RunConfig, base_model: Path, world: World, lineage: Lineage) -> None:
        """Collective. Raises UserError for a server that cannot teach, and a prompt function that cannot be loaded."""
        assert config.trainer.teacher is not None
        self._teacher, self._world, self._lineage = config.trainer.teacher, world, lineage
        self._reads = self._servers = None
        if (write := write_of(config.trainer)) is not None:
            assert lineage.reader is not None
            self._reads = TeacherPrompts(write, load_renderer(base_model), lineage.reader.database)
        asked = [teacher for teacher in teachers_of(self._teacher) if is_server(teacher)]
        if asked:
            self._servers = TeacherServers(asked, config, base_model, world, lineage)

    def lessons(self, batch: BatchOutline) -> Lessons:
        """The lessons of a leased batch. Collective."""
        sources = {}
        if not isinstance(self._teacher, str):
            sources = self._world.share(self._lineage.task_sources(batch))
        return Lessons(self._teacher, sources, self._reads, None if self._servers is None else self._servers.logprobs)
