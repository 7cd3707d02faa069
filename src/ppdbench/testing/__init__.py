"""FakeEngine and ScriptedCluster, public: for users' tests too."""

from ppdbench.testing.cluster import ScriptedCluster
from ppdbench.testing.fake import FakeEngine, Fault, FaultKind, Served, Service, every

__all__ = ["FakeEngine", "Fault", "FaultKind", "ScriptedCluster", "Served", "Service", "every"]
