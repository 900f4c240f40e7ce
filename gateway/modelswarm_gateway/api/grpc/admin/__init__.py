"""The Swarm service of the admin port: state, route explanations and drains."""
