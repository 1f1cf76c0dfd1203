"""The network that is being written, a global as in the real package."""

net = None


def default_net():
    assert net, "no network is being built"
    return net


def default_trtnet():
    return default_net().trt_network


def set_network(network):
    global net
    net = network
