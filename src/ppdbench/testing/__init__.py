"""FakeEngine and ScriptedCluster, public: for users' tests too."""
