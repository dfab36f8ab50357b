// Client of the server's HTTP interface: the list of models, and answers as streams of events.

export class ApiError extends Error {
  // `details` are the other members of OpenAI's error object, and the HTTP status if there is one.
  constructor(message, details) {
    super(message);
    this.details = details;
  }
}

export async function models(key) {
  const response = await request("v1/models", { headers: headers(key) });
  return (await response.json()).data.map((model) => model.id);
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
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    throw error.name === "AbortError" ? error : new ApiError("The server cannot be reached.", {});
  }
  if (!response.ok) {
    throw await refusal(response);
  }
  return response;
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
    const { done, value } = await reader.read();
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
