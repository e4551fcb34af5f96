"""Reference estimators: slow and explicit, with every attention weight materialised.

An estimate of exp(q_n.k_p) is a sum over samples. Its logarithm, by log-sum-exp,
is the logit of a softmax over the keys of each frame. All in the scaled space,
frame by frame.
"""

import math

import torch


def scaled(x):
    return x * x.shape[-1] ** -0.25


def frames(x, num_frames):
    return x.unflatten(2, (num_frames, -1)).unbind(2)


def per_frame(k, v, num_frames, logits_of):
    """softmax over each frame's keys of logits_of(k_frame) [B,h,N,P], times its values."""
    pairs = zip(frames(k, num_frames), frames(v, num_frames))
    return torch.stack([logits_of(k_f).softmax(-1) @ v_f for k_f, v_f in pairs], dim=3)


def softmax(q, k, v, num_frames):
    return per_frame(scaled(k), v, num_frames, lambda k_f: scaled(q) @ k_f.mT)


def log_feature(x, w):
    """log xi(x_m, w_c): [B,h,M,C]."""
    return torch.einsum("bhmd,bhcd->bhmc", x, w) - x.square().sum(-1, keepdim=True) / 2


def kernel(q, k, v, w, log_weights, num_frames):
    """log_weights broadcasts to [B,h,N,C]; q and k are scaled."""

    def logits(k_f):
        query_terms = (log_feature(q, w) + log_weights).unsqueeze(3)  # [B,h,N,1,C]
        return (query_terms + log_feature(k_f, w).unsqueeze(2)).logsumexp(-1)

    return per_frame(k, v, num_frames, logits)


def performer(q, k, v, projection, num_frames):
    w = projection.expand(*q.shape[:2], *projection.shape[-2:])
    return kernel(scaled(q), scaled(k), v, w, torch.zeros((), dtype=q.dtype), num_frames)


def log_normal(w, mean):
    """log N(w_c; mean_c', I): [B,h,C,C']."""
    squares = (w.unsqueeze(3) - mean.unsqueeze(2)).square().sum(-1)
    return -squares / 2 - w.shape[-1] * math.log(2 * math.pi) / 2


def alpha(q, q_landmarks, log_density, weighting, beta):
    """log_density [B,h,C,C'] is log q_c'(w_c); the weights before the clamp."""
    own = log_density.diagonal(dim1=2, dim2=3)
    balance = torch.exp(own - log_density.logsumexp(3)).unsqueeze(2)
    similarity = torch.einsum("bhnd,bhcd->bhnc", q, q_landmarks)
    r = similarity.exp() / similarity.exp().sum(2, keepdim=True)
    if weighting == "balance":
        return balance + 0 * r
    if weighting == "decoupled":
        return balance + beta * (r - r.mean(3, keepdim=True))
    return balance + own.exp().unsqueeze(2) * (r - (balance * r).sum(3, keepdim=True))


def lara(q, k, v, q_landmarks, k_landmarks, num_frames, weighting, beta, noise=None):
    q, k, q_landmarks, k_landmarks = map(scaled, (q, k, q_landmarks, k_landmarks))
    mean = q_landmarks + k_landmarks
    w = mean if noise is None else mean + noise
    log_density = log_normal(w, mean)
    return _lara(q, k, v, w, log_density, q_landmarks, num_frames, weighting, beta)


def lara_mixture(q, k, v, q_landmarks, num_frames, weighting, beta, component=None, noise=None):
    """component [B,h,C]: the drawn keys; None: the mixtures' means."""
    q, k, q_landmarks = map(scaled, (q, k, q_landmarks))
    pi = torch.einsum("bhcd,bhmd->bhcm", q_landmarks, k).softmax(3)
    if component is None:
        w = q_landmarks + pi @ k
    else:
        chosen = torch.nn.functional.one_hot(component, k.shape[2]).to(k.dtype)
        w = q_landmarks + chosen @ k + noise
    centres = q_landmarks.unsqueeze(3) + k.unsqueeze(2)  # [B,h,C,M,d]
    squares = (w[:, :, :, None, None] - centres[:, :, None]).square().sum(-1)  # [B,h,C,C',M]
    components = -squares / 2 - w.shape[-1] * math.log(2 * math.pi) / 2
    log_density = (pi.log().unsqueeze(2) + components).logsumexp(-1)
    return _lara(q, k, v, w, log_density, q_landmarks, num_frames, weighting, beta)


def _lara(q, k, v, w, log_density, q_landmarks, num_frames, weighting, beta):
    weights = alpha(q, q_landmarks, log_density, weighting, beta).clamp(min=1e-8)
    standard = -w.square().sum(-1) / 2 - w.shape[-1] * math.log(2 * math.pi) / 2
    own = log_density.diagonal(dim1=2, dim2=3)
    log_weights = weights.log() + (standard - own).unsqueeze(2)
    return kernel(q, k, v, w, log_weights, num_frames)


def ra_sample(q, k_f, v_f, w):
    """f(w) for one sample w [B,h,N,d] per query, on one frame; q cancels."""
    logits = torch.einsum("bhnd,bhpd->bhnp", w, k_f) - k_f.square().sum(-1).unsqueeze(2) / 2
    return logits.softmax(-1) @ v_f


def ra_biased(q, k, v, num_frames, noise=None):
    """noise [F][B,h,N,d]."""
    q, k = scaled(q), scaled(k)
    out = []
    for f, (k_f, v_f) in enumerate(zip(frames(k, num_frames), frames(v, num_frames))):
        w = q + (q @ k_f.mT).softmax(-1) @ k_f
        out.append(ra_sample(q, k_f, v_f, w if noise is None else w + noise[f]))
    return torch.stack(out, dim=3)


def segments(x, num_landmarks, num_frames):
    """The C segments of the space-major tokens, each [B,h,tokens,d]."""
    tokens = [
        t for position in zip(*(f.unbind(2) for f in frames(x, num_frames))) for t in position
    ]
    length = len(tokens) // num_landmarks
    short = (length + 1) * num_landmarks - len(tokens)
    sizes = [length] * short + [length + 1] * (num_landmarks - short)
    out, start = [], 0
    for size in sizes:
        out.append(torch.stack(tokens[start : start + size], dim=2))
        start += size
    assert start == len(tokens)
    return out


def segment_means(x, num_landmarks, num_frames):
    parts = segments(x, num_landmarks, num_frames)
    return torch.stack([part.sum(2) / part.shape[2] for part in parts], dim=2)


def farthest_tokens(x, num_landmarks, num_frames):
    """The token of each segment, head and clip that is farthest from the mean."""
    B, h, _, d = x.shape
    out = torch.zeros(B, h, num_landmarks, d, dtype=x.dtype)
    for c, part in enumerate(segments(x, num_landmarks, num_frames)):
        for b in range(B):
            for head in range(h):
                tokens, global_mean = part[b, head], x[b, head].mean(0)
                mean = tokens.mean(0) * 7 / 8 + global_mean / 8
                distances = [(token - mean).norm().item() for token in tokens]
                out[b, head, c] = part[b, head, distances.index(max(distances))]
    return out


LANDMARKS = {"means": segment_means, "farthest": farthest_tokens}


def lara_module(q, k, v, num_landmarks, num_frames, proposal, landmarks):
    """LARA in eval mode, by the names of the VIT.LARA options."""
    landmarks_of = LANDMARKS[landmarks]
    rest = (num_frames, "decoupled", 1.0)
    if proposal == "single":
        mean = q.mean(2, keepdim=True).expand(-1, -1, num_landmarks, -1)
        return lara_mixture(q, k, v, mean, *rest)
    q_landmarks = landmarks_of(q, num_landmarks, num_frames)
    if proposal == "mixture":
        return lara_mixture(q, k, v, q_landmarks, *rest)
    if proposal == "global":
        k_landmarks = (scaled(q_landmarks) @ scaled(k).mT).softmax(-1) @ k
    else:
        k_landmarks = landmarks_of(k, num_landmarks, num_frames)
    if proposal == "mixed":
        own = scaled(k_landmarks)
        k_landmarks = (own @ own.mT).softmax(-1) @ k_landmarks
    return lara(q, k, v, q_landmarks, k_landmarks, *rest)


def nystrom(q, k, v, q_landmarks, k_landmarks, num_frames, iterations=6):
    q, k, q_landmarks, k_landmarks = map(scaled, (q, k, q_landmarks, k_landmarks))
    middle = (q_landmarks @ k_landmarks.mT).softmax(-1)
    identity = torch.eye(middle.shape[-1], dtype=q.dtype)
    z = middle.mT / (middle.sum(2).amax(2) * middle.sum(3).amax(2))[..., None, None]
    for _ in range(iterations):
        m = middle @ z
        z = z @ (13 * identity - m @ (15 * identity - m @ (7 * identity - m))) / 4
    left = (q @ k_landmarks.mT).softmax(-1)
    right = [
        (q_landmarks @ k_f.mT).softmax(-1) @ v_f
        for k_f, v_f in zip(frames(k, num_frames), frames(v, num_frames))
    ]
    return torch.stack([left @ z @ means for means in right], dim=3)


def orthoformer(q, k, v, num_landmarks, num_frames, first):
    B, h, N, _ = q.shape
    landmarks = torch.zeros(B, h, num_landmarks, q.shape[3], dtype=q.dtype)
    for b in range(B):
        for head in range(h):
            unit = q[b, head] / q[b, head].norm(dim=-1, keepdim=True)
            chosen = [first]
            while len(chosen) < num_landmarks:
                others = [n for n in range(N) if n not in chosen]
                worst = [max(abs(unit[n] @ unit[c]).item() for c in chosen) for n in others]
                chosen.append(others[worst.index(min(worst))])
            landmarks[b, head] = q[b, head, chosen]
    q, k, landmarks = map(scaled, (q, k, landmarks))
    left = (q @ landmarks.mT).softmax(-1)
    right = [
        (landmarks @ k_f.mT).softmax(-1) @ v_f
        for k_f, v_f in zip(frames(k, num_frames), frames(v, num_frames))
    ]
    return torch.stack([left @ means for means in right], dim=3)


def over_frames(q, k, v, num_frames, attend_to_frame):
    """attend_to_frame(q [N,d], k [P,d], v [P,d], b, h, f) for each clip, head and frame."""
    out = []
    for f, (k_f, v_f) in enumerate(zip(frames(k, num_frames), frames(v, num_frames))):
        heads = [
            [attend_to_frame(q[b, h], k_f[b, h], v_f[b, h], b, h, f) for h in range(q.shape[1])]
            for b in range(q.shape[0])
        ]
        out.append(torch.stack([torch.stack(clip) for clip in heads]))
    return torch.stack(out, dim=3)


def members(groups):
    """The keys of each group, as lists."""
    return [[p for p, own in enumerate(groups) if own == c] for c in range(max(groups) + 1)]


def equal_share_attention(q, k, v, groups):
    """Attention over the mean key and value of each group, with the log of its size."""
    parts = members(groups)
    keys = torch.stack([k[part].mean(0) for part in parts])
    values = torch.stack([v[part].mean(0) for part in parts])
    sizes = torch.tensor([len(part) for part in parts], dtype=q.dtype)
    return (q @ keys.T / math.sqrt(q.shape[1]) + sizes.log()).softmax(-1) @ values


def standardised(x):
    """Tokens [P,d] with mean 0 and a mean square of 1."""
    x = x - x.mean(0)
    return x / x.square().mean().sqrt()


def merged_groups(k, v, num_groups, rounds, values):
    """The groups of the keys of one frame, by an explicit matrix of squared distances."""
    x = standardised(k) + values * standardised(v)
    distances = (x[:, None] - x[None]).square().sum(-1)
    centres = [x.square().sum(-1).argmin().item()]
    for part in range(rounds):
        number = (num_groups - 1) // rounds + (part < (num_groups - 1) % rounds)
        nearest = distances[:, centres].min(1).values
        free = [p for p in range(len(k)) if p not in centres]
        free.sort(key=lambda p: -nearest[p].item())
        candidates = free[: 2 * number]
        remoteness = [
            min([nearest[p].item(), *(distances[p, other].item() for other in candidates[:i])])
            for i, p in enumerate(candidates)
        ]
        order = sorted(range(len(candidates)), key=lambda i: -remoteness[i])
        centres += [candidates[i] for i in order[:number]]
    return [
        centres.index(p) if p in centres else distances[p, centres].argmin().item()
        for p in range(len(k))
    ]


def merged_frame(q, k, v, groups):
    """Attention to one frame for given groups; the term of the logits' variance is constant."""
    d = q.shape[1]
    mean_q = q.mean(0)
    variance = (q - mean_q).square().mean()
    keys, values, biases = [], [], []
    for part in members(groups):
        shares = (k[part] @ mean_q / math.sqrt(d)).softmax(0)
        keys.append(shares @ k[part])
        values.append(shares @ v[part])
        spread = shares @ (k[part] - keys[-1]).square().sum(-1)
        second_order = (variance * spread / (2 * d)).detach()
        biases.append(second_order - (shares * shares.log()).sum())
    logits = q @ torch.stack(keys).T / math.sqrt(d) + torch.stack(biases)
    return logits.softmax(-1) @ torch.stack(values)


def merged(q, k, v, num_groups, num_frames, rounds=4, values=0.7):
    def attend_to_frame(q, k, v, b, h, f):
        groups = merged_groups(k.detach(), v.detach(), num_groups, rounds, values)
        return merged_frame(q, k, v, groups)

    return over_frames(q, k, v, num_frames, attend_to_frame)


def pooled(q, k, v, num_groups, num_frames):
    tokens = k.shape[2] // num_frames
    side = math.isqrt(tokens)
    if side * side == tokens:
        shapes = [
            (rows, columns)
            for rows in range(1, side + 1)
            for columns in range(1, side + 1)
            if rows * columns <= num_groups
        ]
        most = max(rows * columns for rows, columns in shapes)
        best = [shape for shape in shapes if shape[0] * shape[1] == most]
        rows, columns = min(best, key=lambda shape: (abs(shape[0] - shape[1]), shape[0]))
        at = [divmod(token, side) for token in range(tokens)]
        groups = [(y * rows // side) * columns + x * columns // side for y, x in at]
    else:
        groups = [token * num_groups // tokens for token in range(tokens)]
    return over_frames(
        q, k, v, num_frames, lambda q, k, v, *_: equal_share_attention(q, k, v, groups)
    )


def tome_groups(k, num_groups):
    """Bipartite matching with Ward's distance; clusters are lists of keys in a fixed order."""
    clusters = [[p] for p in range(len(k))]
    while len(clusters) > num_groups:
        first, second = clusters[::2], clusters[1::2]
        costs, partners = [], []
        for a in first:
            ward = [
                (k[a].mean(0) - k[b].mean(0)).square().sum().item()
                * (len(a) * len(b) / (len(a) + len(b)))
                for b in second
            ]
            costs.append(min(ward))
            partners.append(ward.index(min(ward)))
        order = sorted(range(len(first)), key=costs.__getitem__)
        merges = order[: len(clusters) - num_groups]
        grown = [[*b] for b in second]
        for a in merges:
            grown[partners[a]] += first[a]
        clusters = [
            grown[i // 2] if i % 2 else first[i // 2]
            for i in range(len(clusters))
            if i % 2 or i // 2 not in merges
        ]
    groups = [0] * len(k)
    for number, cluster in enumerate(clusters):
        for p in cluster:
            groups[p] = number
    return groups


def tome(q, k, v, num_groups, num_frames):
    def attend_to_frame(q, k, v, b, h, f):
        return equal_share_attention(q, k, v, tome_groups(k.detach(), num_groups))

    return over_frames(q, k, v, num_frames, attend_to_frame)


def eva(q, k, v, windows, chunks, num_frames, noise=None):
    tokens = k.shape[2] // num_frames
    parts = members(chunks)

    def attend_to_frame(q, k, v, b, h, f):
        root = math.sqrt(q.shape[1])
        keys, values = [], []
        for c, part in enumerate(parts):
            k_mean, q_mean = k[part].mean(0), q[f * tokens + torch.tensor(part)].mean(0)
            w = (q_mean + k_mean) / root**0.5
            if noise is not None:
                w = w + noise[b, h, f, c]
            x = k[part] / root**0.5
            keys.append(k_mean)
            values.append((x @ w - x.square().sum(-1) / 2).softmax(0) @ v[part])
        out = []
        for n in range(len(q)):
            window = windows[n % tokens]
            inside = [p for p in range(tokens) if windows[p] == window]
            others = [c for c, part in enumerate(parts) if windows[part[0]] != window]
            seen_keys = torch.stack([*k[inside], *(keys[c] for c in others)])
            seen_values = torch.stack([*v[inside], *(values[c] for c in others)])
            sizes = [1.0] * len(inside) + [len(parts[c]) for c in others]
            logits = seen_keys @ q[n] / root + torch.tensor(sizes, dtype=q.dtype).log()
            out.append(logits.softmax(0) @ seen_values)
        return torch.stack(out)

    return over_frames(q, k, v, num_frames, attend_to_frame)
