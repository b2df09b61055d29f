"""The Ray side: the service a trainer calls and the hosts that run engines."""
