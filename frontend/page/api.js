// Client of the server's HTTP interface: its health, the list of models, and answers as streams of events.

export class ApiError extends Error {
  // `details` are the other members of OpenAI's error object, and the HTTP status if there is one.
  constructor(message, details) {
    super(message);
    this.details = details;
  }

  get unauthorized() {
    return this.details.status === 401;
  }

  get unreachable() {
    return this.details.status === undefined && this.details.type === undefined;
  }
}

// Returns { status, reason, percent, model }. Throws ApiError if the server cannot be reached.
export async function health() {
  const response = await send("health/ready", { cache: "no-store" });
  try {
    return await response.json();
  } catch {
    return { status: "failing", reason: `the health check answered ${response.status}` };
  }
}

export async function models(key, signal) {
  const response = await request("v1/models", { headers: headers(key), signal });
  return (await response.json()).data.map((model) => model.id);
}

export async function openapi(key) {
  return (await request("openapi.json", { headers: headers(key) })).json();
}

// Yields the parsed events of a streamed answer. Throws ApiError, or AbortError once the signal is given.
export async function* answer(path, body, key, signal) {
  const response = await request(path, {
    method: "POST",
    headers: { "content-type": "application/json", ...headers(key) },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of eventData(response.body.getReader())) {
    const event = JSON.parse(data);
    if (event.error) {
      throw failure(event.error);
    }
    yield event;
  }
}

function headers(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

async function request(path, options) {
  const response = await send(path, options);
  if (!response.ok) {
    throw await refusal(response);
  }
  return response;
}

async function send(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError("The server cannot be reached.", {});
  }
}

async function refusal(response) {
  const text = await response.text();
  try {
    return failure(JSON.parse(text).error, response.status);
  } catch {
    return new ApiError(text || response.statusText, { status: response.status });
  }
}

function failure({ message, ...details }, status) {
  return new ApiError(message, { status, ...details });
}

async function* eventData(reader) {
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await read(reader);
    if (done) {
      throw new ApiError("The connection ended before the answer did.", {});
    }
    const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines.filter((one) => one.startsWith("data:"))) {
      const data = line.slice(5).trim();
      if (data === "[DONE]") {
        return;
      }
      yield data;
    }
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError("The connection ended before the answer did.", {});
  }
}
