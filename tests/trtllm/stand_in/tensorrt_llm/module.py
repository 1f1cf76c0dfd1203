"""A tree of modules with named parameters."""


class Module:
    def __init__(self):
        self._modules, self._parameters = {}, {}

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def __getattr__(self, name):
        parameters = self.__dict__.get("_parameters") or {}
        if name in parameters:
            return parameters[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")

    def register_parameter(self, name, parameter):
        self._parameters[name] = parameter

    def named_modules_with_parent(self):
        yield "", self, None

    def named_parameters(self):
        yield from self._parameters.items()

    def named_network_outputs(self):
        return iter(())
