"""Which rank does what."""


class Mapping:
    def __init__(self, world_size=1, rank=0, tp_size=1, pp_size=1, cp_size=1):
        assert world_size == tp_size * pp_size * cp_size
        self.world_size, self.rank, self.tp_size, self.pp_size, self.cp_size = (
            world_size,
            rank,
            tp_size,
            pp_size,
            cp_size,
        )

    @classmethod
    def from_dict(cls, mapping):
        return cls(**mapping)

    def to_dict(self):
        return dict(vars(self))

    @property
    def tp_rank(self):
        return self.rank % self.tp_size

    @property
    def tp_group(self):
        return list(range(self.tp_size))

    def pp_layers(self, num_layers):
        return list(range(num_layers))
