"""The ModelSwarm resource: spec, rules, status, loading."""
