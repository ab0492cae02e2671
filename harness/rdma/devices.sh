# Sourced in the guest: two RDMA devices, `rxe0` and `rxe1`, over network devices `d0` and `d1` that lead nowhere else.
# Their GID at index 1 is the IPv4 address.
for number in 0 1; do
  ip link add "d$number" type dummy
  ip link set "d$number" mtu 9000 up
  ip addr add "10.99.$number.1/24" dev "d$number"
  rdma link add "rxe$number" type rxe netdev "d$number"
done

# NIXL's wheel has a libibverbs of its own with the provider of mlx5 alone: put the system's in its place.
for bundled in .venv/lib/python*/site-packages/nixl_cu*.libs/libibverbs-*; do
  mount --bind "/usr/lib/$(uname -m)-linux-gnu/libibverbs.so.1" "$bundled"
done
export UCX_IB_GID_INDEX=1 MC_GID_INDEX=1

# Routes to this host's own addresses come after the rules of `link.py`, not first.
ip rule add pref 200 lookup local
ip rule delete pref 0
